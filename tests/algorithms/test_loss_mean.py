"""Means over a mini-batch, by hand: three responses of 2, 0 and 1 tokens, with gaps."""

import torch

from hybridflow.algorithms.loss_mean import sequence_token_mean, token_mean, token_sum

LENGTHS = torch.tensor([4, 2, 2])
MASK = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
LOSS = torch.tensor([9.0, 1.0, 9.0, 3.0, 9.0, 9.0, 9.0, 8.0])


def mean(weights: torch.Tensor, divisor: int) -> float:
    return float((weights * LOSS).sum() / divisor)


def test_token_mean_counts_every_response_token_alike():
    assert mean(*token_mean(MASK, LENGTHS)) == (1 + 3 + 8) / 3
    assert mean(*token_sum(MASK, LENGTHS)) == 12
    assert token_mean(MASK, LENGTHS).weights.tolist() == MASK.float().tolist()  # exactly 1: no rounding


def test_sequence_token_mean_counts_every_sequence_alike_that_has_a_token():
    assert mean(*sequence_token_mean(MASK, LENGTHS)) == ((1 + 3) / 2 + 8) / 2


def test_a_mini_batch_without_a_response_token_has_no_loss():
    nothing = torch.zeros(8, dtype=torch.bool)
    for of in (token_mean, sequence_token_mean, token_sum):
        assert mean(*of(nothing, LENGTHS)) == 0
