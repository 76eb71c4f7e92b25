"""Rows whose environment has failed: what they score, and how the others of their prompt are compared."""

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.groups import group_advantages, leave_one_out_advantages
from hybridflow.algorithms.rewards import RunningMoments
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config import RewardConfig
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.flows.dynamic_sampling import nothing_to_learn
from hybridflow.flows.groups import GroupBatchWithReference, of_kept_rows
from hybridflow.recording.iteration import batch_metrics, length_metrics, turn_metrics, turns_of_rows
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.samples import samples_of
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.scorer import Scorer, environment_terms

NAN = float("nan")


def batch(*rewards: float, groups: tuple[int, ...]) -> RolloutBatch:
    """Rows of a prompt token and five more: two sampled, one written, one sampled, one written."""
    size = len(rewards)
    failed = torch.tensor(rewards).isnan()
    mask = torch.tensor([False, True, True, False, True, False]).repeat(size) & ~failed.repeat_interleave(6)
    return RolloutBatch(
        input_ids=torch.arange(6 * size),
        lengths=torch.full((size,), 6),
        prompt_lengths=torch.ones(size, dtype=torch.int64),
        prompt_indices=torch.tensor(groups),
        truncated=torch.zeros(size, dtype=torch.bool),
        response_mask=mask,
        rollout_log_probs=torch.zeros(6 * size),
        environment_rewards=torch.tensor(rewards)[:, None],
    )


def scores(rollout: RolloutBatch, world_size: int = 2) -> Tensor:
    """Of all ranks together."""
    found = torch.zeros(len(rollout))
    for rank in range(world_size):
        [term] = environment_terms(rollout, rank, world_size)
        found[term.where] = term.values
    return found


def test_a_failed_row_scores_the_mean_of_its_prompt() -> None:
    rollout = batch(1.0, NAN, 0.0, 4.0, NAN, NAN, NAN, groups=(0, 0, 0, 1, 1, 2, 2))
    assert scores(rollout).tolist() == [1.0, 0.5, 0.0, 4.0, 4.0, 0.0, 0.0]


def test_others_are_compared_as_if_there_were_no_failed_row() -> None:
    rollout = batch(1.0, NAN, 0.0, 4.0, NAN, 2.0, 2.0, groups=(0, 0, 0, 1, 1, 2, 2))
    given = torch.tensor([1.0, 9.0, 0.0, 4.0, 9.0, 2.0, 2.0])
    found = of_kept_rows(lambda x, its: leave_one_out_advantages(x, its.prompt_indices), given, rollout)
    assert found.tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0]  # the fourth has nobody left
    found = of_kept_rows(lambda x, its: group_advantages(x, its.prompt_indices), given, rollout)
    torch.testing.assert_close(found[[0, 2]], torch.tensor([0.5, -0.5]) / (0.5**0.5 + 1e-6))


def test_without_a_failed_row_nothing_is_done() -> None:
    rollout, given = batch(1.0, 0.0, groups=(0, 0)), torch.tensor([1.0, 0.0])
    assert of_kept_rows(lambda x, its: x * 2, given, rollout).tolist() == [2.0, 0.0]


def test_all_rows_may_have_failed() -> None:
    rollout = batch(NAN, NAN, groups=(0, 0))
    assert of_kept_rows(lambda x, its: x / 0, torch.ones(2), rollout).tolist() == [0.0, 0.0]
    assert turn_metrics(rollout) == {"environment/failed_rows": 2.0}


def test_turns_and_written_tokens_are_counted() -> None:
    rollout = batch(1.0, NAN, 0.0, groups=(0, 0, 0))
    assert turns_of_rows(rollout).tolist() == [2, 0, 2]
    found = {name: float(value) for name, value in turn_metrics(rollout).items()}
    expected = {"failed_rows": 1.0, "turns_mean": 2.0, "written_tokens_mean": 2.0}
    assert found == {f"environment/{name}": value for name, value in expected.items()}


def test_rows_keep_their_rewards_when_they_are_chosen() -> None:
    rollout = batch(1.0, NAN, 3.0, groups=(0, 0, 1)).select(torch.tensor([2, 1]))
    assert rollout.environment_rewards[0].tolist() == [3.0] and rollout.failed.tolist() == [False, True]
    assert "environment_rewards" in rollout.tensors()


def known(rollout: RolloutBatch, raw_scores: Tensor) -> GroupBatchWithReference:
    """Log-probs that differ from the reference's by 0.5 at each token that the model wrote."""
    zeros = torch.zeros(len(rollout.input_ids))
    return GroupBatchWithReference(
        **vars(rollout),
        log_probs=zeros,
        ref_log_probs=zeros - 0.5,
        raw_scores=raw_scores,
        scores=2 * raw_scores,
        advantages=zeros,
    )


def test_no_mean_counts_a_failed_row() -> None:
    """A group whose first row scores 1 and whose second fails, and one of two equal scores."""
    rollout = batch(1.0, NAN, 3.0, 3.0, groups=(0, 0, 1, 1))
    whole = known(rollout, torch.tensor([1.0, 9.0, 3.0, 3.0]))
    found = batch_metrics(whole)
    assert float(found["reward/score_mean"]) == pytest.approx(7 / 3)
    assert float(found["reward/score_std"]) == pytest.approx((8 / 9) ** 0.5)
    assert float(found["reward/score_shaped_mean"]) == pytest.approx(14 / 3)
    assert float(found["kl/sequence_mean"]) == 1.5, "three sampled tokens of 0.5 a row"
    assert float(found["rollout/response_length_mean"]) == 3.0
    assert float(found["reward/equal_groups_fraction"]) == 0.5
    kept = whole.select((~rollout.failed).nonzero().flatten())
    assert {name: float(value) for name, value in batch_metrics(kept).items()} == {
        name: float(value) for name, value in found.items()
    }


def test_no_mean_of_a_bucket_counts_a_failed_row() -> None:
    buckets = LengthBuckets((1,), (0, 1))
    found = length_metrics(known(batch(1.0, NAN, groups=(0, 0)), torch.tensor([1.0, 9.0])), buckets)
    assert float(found["sampling/up_to_1/score_mean"]) == 1.0
    assert float(found["sampling/up_to_1/response_length_mean"]) == 3.0
    found = length_metrics(known(batch(NAN, NAN, groups=(0, 0)), torch.tensor([9.0, 9.0])), buckets)
    assert found["sampling/up_to_1/prompts"] == 1.0 and "sampling/up_to_1/score_mean" not in found


@pytest.mark.parametrize("normalization", ["batch", "running"])
def test_scores_are_normalised_by_those_that_count(normalization: str) -> None:
    """Of 1, 3 and 5: mean 3, unbiased deviation 2."""
    config = RewardConfig(functions=[{"function": "hybridflow.rewards:exact_match"}], normalization=normalization)
    caller = FunctionCaller(lambda ids: "", 0, 1)
    scorer = Scorer(config, [], caller=caller, watch=Stopwatch(lambda: None), limits=always(10))
    rollout, given = batch(1.0, NAN, 3.0, NAN, 5.0, groups=(0, 0, 0, 1, 1)), torch.tensor([1.0, 9.0, 3.0, -7.0, 5.0])
    found, moments = scorer.shaped(given, rollout, RunningMoments())
    assert found[[0, 2, 4]].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    if normalization == "running":
        assert (moments.count, moments.mean) == (3.0, 3.0)


def test_a_group_whose_other_rows_score_alike_teaches_nothing() -> None:
    """Reward functions score a failed row's empty text: 9 here."""
    rollout = batch(1.0, NAN, 1.0, 1.0, NAN, 2.0, 3.0, NAN, NAN, NAN, groups=(0, 0, 0, 1, 1, 2, 2, 2, 3, 3))
    given = torch.tensor([1.0, 9.0, 1.0, 1.0, 9.0, 2.0, 3.0, 9.0, 9.0, 8.0])
    assert nothing_to_learn(given, rollout).tolist() == [True, True, False, True]
    alone = batch(1.0, 2.0, 2.0, groups=(0, 1, 1))
    assert nothing_to_learn(torch.tensor([1.0, 2.0, 2.0]), alone).tolist() == [False, True]


def test_a_sample_of_a_failed_row_has_no_score() -> None:
    rollout, prompts = batch(1.0, NAN, groups=(0, 0)), PromptBatch(torch.zeros(1), torch.ones(1), ("p",), {})
    scores = torch.tensor([1.0, NAN])
    first, second = samples_of(rollout, prompts, [0, 1], str, kind="train", scores=scores, parts={"a": scores})
    assert (first["score"], first["parts"], second["score"], second["parts"]) == (1.0, {"a": 1.0}, None, {})
