"""Means over a mini-batch, by hand: three responses of 2, 0 and 1 tokens, with gaps."""

import pytest
import torch

from hybridflow.algorithms.loss_mean import (
    constant,
    prompt_mean,
    sequence_sum_mean,
    sequence_token_mean,
    token_mean,
    token_sum,
)

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
    for of in (token_mean, sequence_token_mean, token_sum, sequence_sum_mean):
        assert mean(*of(nothing, LENGTHS)) == 0
    assert mean(*constant(nothing, LENGTHS, max_response_length=8)) == 0
    assert mean(*prompt_mean(nothing, LENGTHS, torch.tensor([0, 0, 1]))) == 0


def test_sequence_sum_mean_and_the_constant_leave_out_a_sequence_without_a_token():
    assert mean(*sequence_sum_mean(MASK, LENGTHS)) == (1 + 3 + 8) / 2
    assert mean(*constant(MASK, LENGTHS, max_response_length=16)) == (1 + 3 + 8) / (2 * 16)


def test_prompt_mean_counts_every_prompt_alike_that_has_a_token():
    assert mean(*prompt_mean(MASK, LENGTHS, torch.tensor([4, 4, 2]))) == ((1 + 3) / 2 + 8) / 2
    assert mean(*prompt_mean(MASK, LENGTHS, torch.tensor([2, 4, 2]))) == (1 + 3 + 8) / 3  # prompt 4 has none
    assert mean(*prompt_mean(MASK, LENGTHS, torch.tensor([0, 1, 2]))) == mean(*sequence_token_mean(MASK, LENGTHS))


def test_the_means_agree_on_equal_lengths():
    """Over 6 tokens each of 5 sequences, in 2 groups, up to the length where nothing divides by it."""
    lengths, groups = torch.full((5,), 8), torch.tensor([0, 0, 1, 1, 1])
    mask = (torch.arange(8) >= 2).repeat(5)
    loss = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = [token_mean(mask, lengths), sequence_token_mean(mask, lengths)]
    found += [constant(mask, lengths, max_response_length=6)]
    weights, divisor = sequence_sum_mean(mask, lengths)
    found += [(weights, 6 * divisor)]
    expected = loss[mask].mean()
    for weights, divisor in found:
        torch.testing.assert_close((weights * loss).sum() / divisor, expected)
    alike = loss.view(5, 8)[[0, 1, 0, 1]].flatten()
    weights, divisor = prompt_mean(mask[:32], lengths[:4], groups[[0, 0, 2, 2]])  # groups of one size
    torch.testing.assert_close((weights * alike).sum() / divisor, alike[mask[:32]].mean())


@pytest.mark.parametrize("seed", range(3))
def test_each_equals_loops_over_sequences_with_gaps_and_tails(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (14,), generator=generator)
    groups = torch.randint(0, 5, (14,), generator=generator) * 3
    mask = torch.rand(int(lengths.sum()), generator=generator) < 0.4
    loss = torch.rand(len(mask), dtype=torch.float64, generator=generator)
    pieces = zip(loss.split(lengths.tolist()), mask.split(lengths.tolist()), groups.tolist(), strict=True)
    rows = [(x[m].tolist(), g) for x, m, g in pieces if m.any()]
    assert len(rows) < 14
    of_prompts = [[y for x, g in rows if g == group for y in x] for group in sorted({g for _, g in rows})]
    tokens = [y for x, _ in rows for y in x]
    expected = {
        token_mean: sum(tokens) / len(tokens),
        sequence_token_mean: sum(sum(x) / len(x) for x, _ in rows) / len(rows),
        sequence_sum_mean: sum(tokens) / len(rows),
        constant: sum(tokens) / (len(rows) * 20),
        prompt_mean: sum(sum(x) / len(x) for x in of_prompts) / len(of_prompts),
    }
    found = {of: of(mask, lengths) for of in (token_mean, sequence_token_mean, sequence_sum_mean)}
    found |= {
        constant: constant(mask, lengths, max_response_length=20),
        prompt_mean: prompt_mean(mask, lengths, groups),
    }
    for of, (weights, divisor) in found.items():
        assert (weights[~mask] == 0).all()
        assert float((weights.double() * loss).sum() / divisor) == pytest.approx(expected[of], rel=1e-6)
