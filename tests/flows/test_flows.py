"""Flows of one's own and the shipped ones as whole iterations on two ranks, and what stops them."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.cli.plan import main as plan
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.flows import BAD_ROW
from tests.flows.flows_worker import CRITIC_FREE, critic_free
from tests.launch import run_ranks
from tests.messages import like

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = make_inputs(tmp_path_factory.mktemp("flows"))
    poison(root, "reward", "score.weight")
    poison(root, "policy", "lm_head.weight")
    behead(root)
    write_config(root / "config.yaml", root)
    return root


@pytest.fixture(scope="module")
def records(root) -> dict[str, dict]:
    run_ranks(2, "tests.flows.flows_worker", root, root / "config.yaml", root / "out.json")
    return json.loads((root / "out.json").read_text())


def poison(root: Path, role: str, weight: str) -> None:
    """A copy of a model with a NaN in one weight, as ROOT/bad_ROLE."""
    target = shutil.copytree(root / role, root / f"bad_{role}")
    tensors = load_file(target / "model.safetensors")
    tensors[weight][-1, 0] = math.nan
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def behead(root: Path) -> None:
    """A reward model without the weight of its head."""
    target = shutil.copytree(root / "reward", root / "headless_reward")
    tensors = load_file(target / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name", ["ppo", "grpo", "grpo_without_kl", "ppo_without_kl", "by_length", *CRITIC_FREE, "engine_log_probs"]
)
def test_shipped_flows_train(name, records):
    record = records[name]
    assert "error" not in record and record["moved"] == [True] * 3
    for metrics in record["metrics"]:
        assert math.isfinite(metrics["actor/loss"]) and math.isfinite(metrics["reward/score_mean"])


def test_mini_batches_of_uneven_groups_are_nearly_equal(records):
    """Four at most in each: of nine rows, as one prompt has three responses, there are three of three."""
    assert records["grpo"]["mini_batches"] == [[4, 4]] * 3
    assert records["by_length"]["mini_batches"] == [[3, 3, 3], [3, 3, 3], [4, 4]]
    prompts = [
        [metrics[f"sampling/{name}/prompts"] for name in ("up_to_5", "up_to_8", "longer")]
        for metrics in records["by_length"]["metrics"]
    ]
    assert prompts == [[1, 2, 1], [1, 2, 1], [0, 4, 0]]


def test_a_batch_has_the_fields_of_its_algorithm(records):
    """No critic, no values; no KL, no reference's log-probs, and no metrics of either."""
    for name in ("ppo", "ppo_without_kl", "grpo", "grpo_without_kl"):
        record, metrics = records[name], records[name]["metrics"][0]
        critic, kl = name.startswith("ppo"), not name.endswith("without_kl")
        assert (
            ("values" in record["fields"]) == ("critic/loss" in metrics) == ("time/values_seconds" in metrics) == critic
        )
        assert ("ref_log_probs" in record["fields"]) == ("kl/reference_mean" in metrics) == kl
        assert ("time/reference_seconds" in metrics) == ("kl/coef" in metrics) == kl


def test_what_an_algorithm_does_not_need_is_neither_held_nor_planned(records, root, capsys):
    assert list(records["ppo"]["bytes"]) == ["actor", "critic", "reference"]
    assert list(records["ppo_without_kl"]["bytes"]) == ["actor", "critic"]
    assert list(records["grpo"]["bytes"]) == ["actor", "reference"]
    assert list(records["grpo_without_kl"]["bytes"]) == ["actor"]
    weights = {name: records["ppo"]["bytes"][name] for name in ("actor", "critic", "reference")}
    keys = ["critic=null", "reference=null", "sampling.samples_per_prompt=2"]
    grpo = "algorithm={name: grpo, kl: {use: none}, update: {mini_batch_size: 4}}"
    totals = {}
    for name, overrides in {"ppo": [], "grpo": [*keys, grpo]}.items():
        assert plan([str(root / "config.yaml"), *overrides, "--world-size", "2", "--json"]) == 0
        totals[name] = json.loads(capsys.readouterr().out)["memory"]["generation"]["worst_rank"]
    planned = totals["ppo"]["weights"] - totals["grpo"]["weights"]
    assert planned == weights["critic"] + weights["reference"]  # what the plan says is what a rank counts


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_critic_free_means_critic_free(name, records, root, capsys):
    """No weight, no field, no metric and no time of a critic, by count and by plan; nor of a reference without a KL."""
    record, absent = records[name], CRITIC_FREE[name]
    roles = [role for role in ("actor", "reference") if role not in absent]
    assert list(record["bytes"]) == roles
    for metrics in record["metrics"]:
        assert not any("critic" in metric or metric == "time/values_seconds" for metric in metrics)
        assert ("time/reference_seconds" in metrics) == ("reference" in roles)
    assert not {"values", "returns"} & set(record["fields"])
    assert plan([str(root / "config.yaml"), *critic_free(name, *absent), "--world-size", "2", "--json"]) == 0
    worst = json.loads(capsys.readouterr().out)["memory"]["generation"]["worst_rank"]
    assert worst["weights"] == sum(record["bytes"].values())


def test_a_student_learns_from_its_teacher_alone(records):
    """No reward, no score, no critic; the KL that it lowers is in the metrics, and falls where lr lets it."""
    record = records["distill"]
    assert "error" not in record and record["moved"] == [True] * 3
    assert list(record["bytes"]) == ["actor", "reference"] and "advantages" in record["fields"]
    for metrics in record["metrics"]:
        assert not any(name.startswith(("reward/", "critic/")) or name == "kl/coef" for name in metrics)
        assert metrics["kl/reference_mean"] > 0 and math.isfinite(metrics["actor/loss"])


def test_scores_below_zero_are_refused_where_their_mean_divides(records):
    record = records["negative_scores"]
    assert record["moved"] == [False]
    assert re.fullmatch(
        r"RewardError: the score of row \d is -[1-9]\.0: maxrl divides by the mean score of a group, none may be "
        r"negative\. Give rewards of at least 0, or choose another algorithm",
        record["error"],
    )


def test_a_greedy_response_a_prompt_takes_no_hand_off_of_its_own(records):
    record = records["remax"]
    assert record["hand_offs"] == 2  # there and back
    for metrics in record["metrics"]:
        assert 0 < metrics["reward/greedy_score_mean"] and "baselines" in record["fields"]


def test_with_the_engines_log_probs_as_the_old_ones_the_trainer_computes_none(records):
    """One forward pass less: the first ratios are engine against trainer."""
    for metrics in records["engine_log_probs"]["metrics"]:
        assert "time/log_probs_seconds" not in metrics and "rollout/gen_kl" not in metrics
        assert 0 < metrics["actor/approx_kl"] < 1e-6
    for name, computes in {"rloo": True, "dr_grpo": False}.items():  # whose only step tells them
        metrics = records[name]["metrics"][0]
        assert ("time/log_probs_seconds" in metrics) == computes and "rollout/gen_kl" in metrics


# ------------------------------------------------------------------------------------------------ a flow of one's own


def test_an_error_in_a_flow_names_function_and_line(records):
    """The innermost line of the user's own file."""
    flows = Path(__file__).with_name("flows.py")
    line = flows.read_text().splitlines().index('    raise KeyError("nothing here")') + 1
    assert records["raises"]["error"] == (
        like(f"FlowError: flow tests.flows.flows:raises: in helper, {flows}, line {line}: KeyError: 'nothing here'")
    )
    assert records["returns_nothing"]["error"] == (
        like(
            "FlowError: flow tests.flows.flows:returns_nothing: returned NoneType; expected the RolloutBatch it "
            "trained on"
        )
    )
    assert (
        "asks for run.critic, but algorithm custom of this config has no critic" in records["wants_a_critic"]["error"]
    )


def test_the_flow_that_the_readme_shows_trains_on_the_best_responses(records):
    record = records["best_of_n"]
    assert "error" not in record and record["moved"] == [True] * 3
    for metrics in record["metrics"]:
        assert metrics["reward/score_mean"] > metrics["reward/score_all_mean"]  # those kept, and all three of a prompt


def test_two_kinds_of_responses_take_one_hand_off(records):
    record = records["sampled_and_greedy"]
    assert record["hand_offs"] == 2  # there and back
    assert record["metrics"][0]["test/greedy_tokens"] > 0


def test_whoever_generates_again_samples_others(records):
    """Four generations of an iteration, of eight tokens from a random model: no two rows are alike."""
    assert "error" not in records["sampled_again"]
    for metrics in records["sampled_again"]["metrics"]:
        assert (metrics["test/rows_alike"], metrics["test/prompts_alike"]) == (0, 3)


def test_a_loss_that_couples_sequences_goes_through_the_log_probs(records):
    """Its derivative is the same number at every token, so the gradient is that of the sum of log-probs."""
    assert records["products"]["moved"] == [True] * 3
    assert all(metrics["actor/grad_norm"] > 0 for metrics in records["products"]["metrics"])


def test_fewer_rows_than_replicas_and_no_response_at_all(records):
    assert records["few_rows"]["moved"] == [True] * 3
    assert records["no_response"]["moved"] == [False] * 3
    for metrics in records["no_response"]["metrics"]:
        assert metrics["actor/loss"] == metrics["actor/grad_norm"] == 0


# ------------------------------------------------------------------------------------------------ not finite


def test_a_nan_in_a_loss_stops_the_run_before_that_step(records, root):
    """The step before it is taken, it and the one after it are not; its row is named and the batch kept."""
    record = records["bad_loss"]
    assert record["moved"] == [True] and record["finite"] and record["metrics"] == []
    assert record["error"].startswith("NonFiniteError: iteration 1: actor, step 2 of the iteration: loss nan, ")
    assert f"first in the loss of row {BAD_ROW} (a response to prompt {BAD_ROW} of the iteration)" in record["error"]
    kept = load_file(root / "bad_loss" / "batches" / "nonfinite_000001.safetensors")
    assert kept["advantages"].isnan().sum() == 0 and len(kept["lengths"]) == 4
    assert "input_ids" in kept and "rollout_log_probs" in kept


def test_steps_may_be_skipped_so_often_in_a_row(records):
    record = records["bad_loss_skipped"]
    assert record["moved"] == [True, True, True] and record["finite"] and record["metrics"] == []
    assert "3 iterations in a row, nonfinite.max_in_a_row = 2" in record["error"]


def test_a_gradient_that_is_not_finite_where_every_loss_is(records):
    record = records["infinite_gradient"]
    assert record["moved"] == [False] and record["finite"]
    assert "first in the gradient alone, every loss is finite" in record["error"]


def test_a_nan_of_a_reward_model_and_of_the_policy_stop_before_any_step(records, root):
    record = records["bad_reward"]
    assert record["moved"] == [False]
    assert "iteration 1: raw_scores is nan in row 0 (a response to prompt 0 of the iteration)" in record["error"]
    assert torch.isnan(load_file(root / "bad_reward" / "batches" / "nonfinite_000001.safetensors")["raw_scores"]).all()
    assert records["bad_policy"]["moved"] == [False] and "log_probs is " in records["bad_policy"]["error"]


def test_a_reward_model_without_a_head_is_refused(records, root):
    """It would score everything 0."""
    assert records["headless_reward"]["error"] == (
        like(
            f"CheckpointError: reward.models.0.model = {root / 'headless_reward'} has no score.weight: each score "
            "would be 0. Give a model that scores"
        )
    )
