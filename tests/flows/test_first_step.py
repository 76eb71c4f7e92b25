"""Old log-probs that come with the first step: alike those of a forward pass, and made once."""

import json
from types import SimpleNamespace

import pytest
import torch

from hybridflow.batch import RolloutBatch, Tokens, response_mask
from hybridflow.config import ExperimentConfig
from hybridflow.config.algorithms import GRPO, PPO, RLOO, Custom, Distill
from hybridflow.flows.deferred_log_probs import DeferredLogProbs
from hybridflow.placement.overlapped_scoring import asks_for_log_probs, defers_old_log_probs, num_deferred_rows
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.first_step_worker import CASES
from tests.launch import run_ranks


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = make_inputs(tmp_path_factory.mktemp("first_step"))
    return write_config(root / "config.yaml", root)


@pytest.fixture(scope="module")
def records(config):
    out = config.with_name("out.json")
    run_ranks(4, "tests.flows.first_step_worker", config, out)
    return json.loads(out.read_text())


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_batches_metrics_and_weights_are_those_of_a_forward_pass_for_all(case, records):
    """But for the order of sums: the rows are beside others in a product. SGD, steps of a hundredth of the gradient."""
    record = records[case]
    assert max(record["batches"]) < 5e-5 and record["weights"] < 1e-5 and record["moved"] > 1
    for differing, values in record["metrics"]:
        assert {name for name in differing if not name.startswith("speed/")} <= {
            "time/log_probs_seconds"
        } and values == {}


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_no_log_prob_of_the_first_mini_batch_is_computed_twice(case, records):
    """Tokens of the pass for old log-probs: all but those of the first mini-batch, of so many rows of 8 tokens."""
    record, (rows, _) = records[case], CASES[case]
    assert record["computed"]["computed"] == record["tokens"]
    left_out = [first if number else 0 for first, number in zip(record["first"], rows, strict=True)]
    assert record["computed"]["told"] == [all_ - less for all_, less in zip(record["tokens"], left_out, strict=True)]
    assert [less > 0 for less in left_out] == [number > 0 for number in rows]
    assert all(less <= 8 * number for less, number in zip(left_out, rows, strict=True))


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_only_step_has_ratios_of_one_to_the_bit(records):
    assert records["one step"]["approx_kl"] == [0.0, 0.0]
    assert records["one step"]["batches"] == [0.0, 0.0] and records["one step"]["weights"] == 0.0
    assert all(kl > 0 for kl in records["two steps"]["approx_kl"])


@pytest.mark.thorough
@pytest.mark.distributed
def test_it_does_not_matter_what_was_run_while_others_generated(records):
    assert records["two steps"]["digests"] == records["two steps while waiting"]["digests"]


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_log_prob_that_is_not_finite_is_said_to_be_where_it_is(records):
    record = records["not finite"]
    assert record["error"].startswith(f"iteration 1: log_probs is nan in row {record['row']} (a response to prompt ")
    assert not record["moved"]


def test_what_is_to_come_is_nan_until_it_comes():
    """Two rows of a prompt token and two more; the second comes later: at its response tokens alone."""
    lengths, prompts = torch.tensor([3, 3]), torch.tensor([1, 1])
    ids = torch.arange(6)
    mask = response_mask(lengths, prompts)
    batch = RolloutBatch(ids, lengths, prompts, torch.arange(2), prompts < 0, mask, -ids.float())
    deferred = DeferredLogProbs(SimpleNamespace(), batch, torch.tensor([1]))
    found = deferred.masked(torch.tensor([0.0, -1.0, -2.0, 0.0, 0.0, 0.0]))
    assert found[:4].tolist() == [0.0, -1.0, -2.0, 0.0] and found[4:].isnan().all()


def test_tokens_with_values_given():
    lengths, ones = torch.tensor([3, 3]), torch.ones(2, dtype=torch.int64)
    mask, six = response_mask(lengths, ones), torch.arange(6)
    batch = RolloutBatch(six, lengths, ones, torch.arange(2), ones < 0, mask, -six.float())
    tokens = Tokens(batch, torch.tensor([1, 4]), torch.device("cpu"))
    given = tokens.with_given(rollout_log_probs=torch.tensor([-7.0, -8.0]))
    assert tokens.rollout_log_probs.tolist() == [-1.0, -4.0] and given.rollout_log_probs.tolist() == [-7.0, -8.0]
    assert given.input_ids.tolist() == [1, 4] and given.sequences.tolist() == [0, 1]
    assert given.with_given(input_ids=tokens.where).rollout_log_probs.tolist() == [-7.0, -8.0]


@pytest.mark.parametrize(
    ("algorithm", "iteration", "expected"),
    [
        (GRPO(name="grpo"), 1, True),
        (GRPO(name="grpo", policy={"old_log_probs": "engine"}), 1, False),
        (RLOO(name="rloo"), 1, False),  # its KL is taken off the score
        (RLOO(name="rloo", kl={"use": "none"}), 1, True),
        (PPO(), 1, False),
        (PPO(kl={"use": "none"}), 1, True),
        (PPO(kl={"use": "none"}, critic_warmup_iterations=2), 2, False),  # the actor takes no step
        (PPO(kl={"use": "none"}, critic_warmup_iterations=2), 3, True),
        (Distill(name="distill"), 1, False),  # advantages are made of them
        (Custom(name="custom", flow="a:b", roles=("actor",)), 1, False),  # which may read them anywhere
    ],
)
def test_which_flows_leave_them_to_the_first_step(algorithm, iteration, expected):
    assert defers_old_log_probs(algorithm, iteration) == expected


GROUPS = ("critic=null", "sampling.samples_per_prompt=2")


@pytest.mark.parametrize(
    ("expected", "overrides"),
    [
        ((0, True), ()),
        ((8, False), (*GROUPS, "algorithm={name: grpo}")),
        ((4, True), (*GROUPS, "algorithm={name: grpo, update: {mini_batch_size: 4}}")),
        ((0, False), (*GROUPS, "algorithm={name: grpo, policy: {old_log_probs: engine}}")),
        ((2, True), ("reference=null", "algorithm.kl.use=none", "algorithm.critic_warmup_iterations=3")),
        ((0, True), (*GROUPS, "algorithm={name: custom, flow: 'a:b', roles: [actor, reference, reward]}")),
    ],
)
def test_rows_told(expected, overrides, config):
    """Of the eight rows of an iteration, or of four."""
    found = ExperimentConfig.from_yaml(config, list(overrides))
    assert (num_deferred_rows(found), asks_for_log_probs(found)) == expected
