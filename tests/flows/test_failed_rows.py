"""Rows whose environment has failed: what they score, and how the others of their prompt are compared."""

import torch
from torch import Tensor

from hybridflow.algorithms.groups import group_advantages, leave_one_out_advantages
from hybridflow.batch import RolloutBatch
from hybridflow.flows.groups import of_kept_rows
from hybridflow.recording.turns import turn_metrics, turns_of_rows
from hybridflow.rewards.scorer import environment_terms

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
