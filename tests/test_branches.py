"""Rows of several sequences: what models read apart, and what counts once for the row."""

from dataclasses import replace

import pytest
import torch

from hybridflow.algorithms.loss_mean import constant, sequence_token_mean
from hybridflow.batch import RolloutBatch, Tokens, joined
from hybridflow.config.algorithms import PPO
from hybridflow.flows.earned import branch_token_rewards
from hybridflow.flows.ppo import estimates
from hybridflow.recording.iteration import turn_metrics
from hybridflow.recording.marked_turns import ANOTHER, marked
from hybridflow.recording.samples import _turns
from hybridflow.rollout.generation import responses_to
from hybridflow.rollout.row import BEGINS, CUT, ENDED, RolloutRow
from tests.rollout.test_generation import prompts

CPU = torch.device("cpu")
OWN = [2, 3, 5, 6, 10, 13, 16, 19]  # places of tokens that the policy chose, of the batch that follows


def whole() -> RolloutBatch:
    """Three rows of 20 tokens, each with a prompt of two: of three sequences, one and two. s: the policy chose it.

    2 3 4 5: p p s s | . s s | . . . s      11 ...: p p s      14 ...: p p s | . . s
    """
    responses = [
        RolloutRow(
            [11, 12, 20, 21, 22, 30, 31, 32, 33], [-1.0] * 9, flags("110110001", 2, 5), state=ENDED, rewards=(1.0,)
        ),
        RolloutRow([41], [-1.0], flags("1"), state=ENDED, rewards=(0.0,)),
        RolloutRow([51, 60, 61, 62], [-1.0] * 4, flags("1001", 1), state=CUT, rewards=(2.0,)),
    ]
    batch = responses_to(prompts([2, 2]), [0, 1], torch.tensor([2, 1]), responses)
    return replace(batch, environment_rewards=torch.tensor([[1.0], [0.0], [2.0]]))


def flags(marks: str, *starts: int) -> bytearray:
    return bytearray(int(mark) + BEGINS * (place in starts) for place, mark in enumerate(marks))


def test_a_batch_knows_the_sequences_of_its_rows() -> None:
    batch = whole()
    assert batch.lengths.tolist() == [11, 3, 6]
    assert batch.branch_starts.nonzero().flatten().tolist() == [4, 7, 17]
    assert batch.response_mask.nonzero().flatten().tolist() == OWN
    assert batch.branch_lengths.tolist() == [4, 3, 4, 3, 3, 3]
    assert batch.rows_of_branches.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.branches_of(torch.tensor([2, 0])).tolist() == [4, 5, 0, 1, 2]


def test_models_read_each_sequence_by_itself() -> None:
    batch = whole()
    read = batch.by_branch()
    assert read.input_ids is batch.input_ids and read.response_mask is batch.response_mask
    assert read.lengths.tolist() == [4, 3, 4, 3, 3, 3] and read.branch_starts is None
    assert read.prompt_lengths.tolist() == [2, 1, 3, 2, 2, 2]
    assert read.prompt_indices.tolist() == [0, 0, 0, 0, 1, 1] and read.truncated.tolist() == [False] * 4 + [True] * 2


def test_a_batch_without_branches_is_read_as_it_is() -> None:
    batch = whole().select(torch.tensor([1]))
    assert batch.branch_starts is None and batch.by_branch() is batch and batch.branch_lengths is batch.lengths
    rows = torch.tensor([0])
    assert batch.branches_of(rows) is rows and "branch_starts" not in batch.tensors()


def test_branches_go_along_with_their_rows() -> None:
    batch = whole()
    chosen = batch.select(torch.tensor([2, 0]))
    assert chosen.branch_lengths.tolist() == [3, 3, 4, 3, 4] and chosen.rows_of_branches.tolist() == [0, 0, 1, 1, 1]
    both = joined(batch, chosen)
    assert both.branch_lengths.tolist() == [4, 3, 4, 3, 3, 3, 3, 3, 4, 3, 4]
    again = RolloutBatch(**batch.tensors())
    assert torch.equal(again.branch_starts, batch.branch_starts)


def test_a_row_counts_once_in_means_over_sequences() -> None:
    """However many branches it has: five tokens, one and two share the weights of three rows."""
    batch = whole()
    weights, divisor = sequence_token_mean(batch.response_mask, batch.lengths)
    assert divisor == 3 and weights[OWN].tolist() == pytest.approx([0.2] * 5 + [1.0] + [0.5] * 2)
    assert constant(batch.response_mask, batch.lengths, max_response_length=8).divisor == 24


def test_ratios_of_sequences_are_of_branches() -> None:
    assert Tokens(whole(), torch.tensor(OWN), CPU).sequences.tolist() == [0, 0, 1, 1, 2, 3, 4, 5]


def test_each_branch_earns_the_score_of_its_row_at_its_end() -> None:
    """Discounted by a half: one token before the end of a branch half of that is to come, and nothing of others."""
    batch, nothing = whole(), torch.zeros(20)
    rewards = branch_token_rewards(torch.tensor([1.0, 0.0, 2.0]), nothing, batch, kl_coef=0.0)
    assert rewards[OWN].tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 2.0, 2.0] and rewards.sum() == 7
    values = torch.where(batch.response_mask, 0.5, torch.nan)
    advantages, returns = estimates(PPO(gamma=0.5, gae_lambda=1.0), batch, rewards, values)
    assert returns[OWN].tolist() == [0.5, 1.0, 0.5, 1.0, 1.0, 0.0, 2.0, 2.0]
    assert advantages[OWN].tolist() == [0.0, 0.5, 0.0, 0.5, 0.5, -0.5, 1.5, 1.5]
    assert advantages.sum() == advantages[OWN].sum() and returns.isfinite().all()


def test_samples_mark_where_a_sequence_begins() -> None:
    batch = whole()
    [ids] = batch.response_token_lists([0])
    turns = _turns(batch, 0, ids, lambda ids: " ".join(map(str, ids)))
    assert turns == [
        {"by": "model", "text": "11 12"},
        {"by": "environment", "text": "20", "begins": True},
        {"by": "model", "text": "21 22"},
        {"by": "environment", "text": "30 31 32", "begins": True},
        {"by": "model", "text": "33"},
    ]
    assert marked(turns).split(ANOTHER)[1:] == ["\u27e620\u27e721 22", "\u27e630 31 32\u27e733"]


def test_metrics_count_sequences_and_not_their_prompts() -> None:
    metrics = turn_metrics(whole())
    assert float(metrics["environment/sequences_mean"]) == 2 and metrics["environment/sequences_max"] == 3
    assert float(metrics["environment/turns_mean"]) == 2 and float(metrics["environment/written_tokens_mean"]) == 0
