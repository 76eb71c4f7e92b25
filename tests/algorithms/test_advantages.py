import pytest
import torch

from hybridflow.algorithms.advantages import (
    discounted_returns,
    gae,
    length_adaptive_lambda,
    masked_mean,
    sequence_sums,
    to_tokens,
    tokens_in_mask,
    whiten,
)
from tests.counted import CountedOperations

# Two sequences: two prompt and three response tokens, then one prompt and two response tokens.
LENGTHS = torch.tensor([5, 3])
MASK = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0, 0.0, -1.0, 4.0])
VALUES = torch.tensor([0.0, 0.0, 1.0, 2.0, 4.0, 0.0, 2.0, -2.0])


def ragged_batch(seed: int, *, num_sequences: int = 17, longest: int = 40):
    """rewards, values (float64), mask and lengths with responses of 1 up to the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (num_sequences,), generator=generator)
    masks = []
    for length in lengths.tolist():
        num_response = int(torch.randint(1, length + 1, (), generator=generator))
        masks.append(torch.arange(length) >= length - num_response)
    mask = torch.cat(masks)
    rewards, values = torch.randn(2, mask.shape[0], dtype=torch.float64, generator=generator)
    return rewards * mask, values * mask, mask, lengths


def naive_gae(rewards, values, mask, *, lengths, gamma, gae_lambda):
    """The defining double sum, one sequence and one token at a time."""
    advantages = torch.zeros_like(rewards)
    start = 0
    for length in lengths.tolist():
        end = start + length
        for t in range(start, end):
            if not mask[t]:
                continue
            for later in range(t, end):
                next_value = values[later + 1] if later + 1 < end else 0.0
                delta = rewards[later] + gamma * next_value - values[later]
                advantages[t] += (gamma * gae_lambda) ** (later - t) * delta
        start = end
    return advantages


def test_gae_by_hand():
    advantages, returns = gae(REWARDS, VALUES, MASK, lengths=LENGTHS, gamma=0.5, gae_lambda=0.5)
    # First:  delta = 1 + 1 - 1, 0 + 2 - 2, 2 - 4 = 1, 0, -2;  A = 1 + 0/4 - 2/16, 0 - 2/4, -2.
    # Second: delta = -1 - 1 - 2, 4 + 2 = -4, 6;                A = -4 + 6/4, 6.
    assert advantages.tolist() == [0.0, 0.0, 0.875, -0.5, -2.0, 0.0, -2.5, 6.0]
    assert returns.tolist() == [0.0, 0.0, 1.875, 1.5, 2.0, 0.0, -0.5, 4.0]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_gae_equals_the_naive_double_sum(gamma, gae_lambda):
    rewards, values, mask, lengths = ragged_batch(0)
    options = {"lengths": lengths, "gamma": gamma, "gae_lambda": gae_lambda}
    expected = naive_gae(rewards, values, mask, **options)
    advantages, returns = gae(rewards, values, mask, **options)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, expected + values, rtol=1e-12, atol=1e-12)
    in_float32, _ = gae(rewards.float(), values.float(), mask, **options)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 64, 65])
def test_gae_of_one_sequence_at_lengths_about_powers_of_two(length):
    generator = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, length, dtype=torch.float64, generator=generator)
    mask = torch.ones(length, dtype=torch.bool)
    options = {"lengths": torch.tensor([length]), "gamma": 0.99, "gae_lambda": 0.97}
    advantages, _ = gae(rewards, values, mask, **options)
    expected = naive_gae(rewards, values, mask, **options)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)


def test_lambda_one_gives_the_discounted_return_minus_the_value():
    advantages, returns = gae(REWARDS, VALUES, MASK, lengths=LENGTHS, gamma=0.5, gae_lambda=1.0)
    assert returns.tolist() == [0.0, 0.0, 1.0 + 2.0 / 4, 2.0 / 2, 2.0, 0.0, -1.0 + 4.0 / 2, 4.0]
    assert advantages.tolist() == (returns - VALUES).tolist()


def test_lambda_zero_gives_the_one_step_error():
    advantages, _ = gae(REWARDS, VALUES, MASK, lengths=LENGTHS, gamma=0.5, gae_lambda=0.0)
    assert advantages.tolist() == [0.0, 0.0, 1.0, 0.0, -2.0, 0.0, -4.0, 6.0]


def test_without_discount_a_final_score_reaches_every_token_undiminished():
    rewards, values = torch.zeros(1000), torch.zeros(1000)
    rewards[-1] = 3.0
    mask = torch.ones(1000, dtype=torch.bool)
    advantages, _ = gae(rewards, values, mask, lengths=torch.tensor([1000]), gamma=1.0, gae_lambda=1.0)
    assert advantages.tolist() == [3.0] * 1000


def test_permuted_sequences_permute_the_result():
    rewards, values, mask, lengths = ragged_batch(1)
    order = torch.randperm(lengths.shape[0], generator=torch.Generator().manual_seed(2))
    spans = torch.arange(mask.shape[0]).split(lengths.tolist())
    tokens = torch.cat([spans[i] for i in order.tolist()])
    options = {"gamma": 0.9, "gae_lambda": 0.8}
    expected = gae(rewards, values, mask, lengths=lengths, **options)
    actual = gae(rewards[tokens], values[tokens], mask[tokens], lengths=lengths[order], **options)
    assert torch.equal(actual[0], expected[0][tokens])
    assert torch.equal(actual[1], expected[1][tokens])


@pytest.mark.parametrize("filler", [7.0, float("inf"), float("nan")])
def test_gae_does_not_read_outside_the_response(filler):
    rewards, values, mask, lengths = ragged_batch(3)
    options = {"lengths": lengths, "gamma": 0.9, "gae_lambda": 0.8}
    expected = gae(rewards, values, mask, **options)
    actual = gae(rewards.masked_fill(~mask, filler), values.masked_fill(~mask, filler), mask, **options)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def test_gae_leaves_its_inputs_as_they_were():
    rewards, values, mask, lengths = ragged_batch(4)
    copies = rewards.clone(), values.clone()
    gae(rewards, values, mask, lengths=lengths, gamma=0.9, gae_lambda=0.9)
    assert torch.equal(rewards, copies[0]) and torch.equal(values, copies[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(2, 4)}, r"^rewards .*one dimension"),
        ({"values": torch.zeros(7)}, r"^values .*as long as rewards"),
        ({"response_mask": torch.ones(9, dtype=torch.bool)}, r"^response_mask .*as long as rewards"),
        ({"response_mask": torch.ones(8)}, r"^response_mask .*boolean"),
        ({"lengths": torch.tensor([[5, 3]])}, r"^lengths .*one dimension"),
        ({"lengths": torch.tensor([5, 3], dtype=torch.int32)}, r"^lengths .*int64"),
        ({"lengths": torch.tensor([5, 4])}, r"^lengths .*sum to the number of tokens, 8, not 9"),
    ],
)
def test_gae_rejects(change, message):
    inputs = {"rewards": REWARDS, "values": VALUES, "response_mask": MASK, "lengths": LENGTHS} | change
    with pytest.raises(ValueError, match=message):
        gae(**inputs, gamma=1.0, gae_lambda=1.0)


def test_masked_mean_by_hand():
    x = torch.tensor([1.0, float("nan"), 3.0, 8.0])
    mask = torch.tensor([True, False, True, True])
    assert masked_mean(x, mask) == 4.0
    assert masked_mean(x > 2.0, mask) == pytest.approx(2 / 3)
    assert masked_mean(x, torch.zeros(4, dtype=torch.bool)).isnan()


def test_masked_mean_has_gradient_one_over_the_count():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    masked_mean(x, torch.tensor([True, False, True])).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


def test_whiten_by_hand():
    x = torch.tensor([1.0, 99.0, 2.0, 3.0])
    # mean 2, unbiased variance (1 + 0 + 1) / 2 = 1
    expected = torch.tensor([-1.0, 0.0, 0.0, 1.0])
    torch.testing.assert_close(whiten(x, torch.tensor([True, False, True, True])), expected)


def test_whiten_equals_the_standard_score_of_the_selection():
    x, _, mask, _ = ragged_batch(5)
    x = 3.0 * x - 7.0
    selected = x[mask]
    expected = torch.zeros_like(x)
    expected[mask] = (selected - selected.mean()) / selected.std()
    torch.testing.assert_close(whiten(x, mask), expected, rtol=1e-6, atol=1e-6)


def test_whiten_ignores_shift_positive_scale_and_the_outside():
    x, _, mask, _ = ragged_batch(6)
    expected = whiten(x, mask)
    torch.testing.assert_close(whiten(5.0 * x - 100.0, mask), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whiten(-x, mask), -expected)
    assert torch.equal(whiten(x.masked_fill(~mask, float("nan")), mask), expected)


def test_whiten_of_equal_values_or_of_one_value_is_zero():
    mask = torch.ones(7, dtype=torch.bool)
    assert whiten(torch.full((7,), 1000.1), mask).tolist() == [0.0] * 7
    assert whiten(torch.tensor([5.0, 6.0]), torch.tensor([False, True])).tolist() == [0.0, 0.0]


def test_whiten_of_nothing_is_zero():
    assert whiten(torch.tensor([5.0, float("nan")]), torch.zeros(2, dtype=torch.bool)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function", [masked_mean, whiten])
@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), r"^x .*one dimension"),
        (torch.zeros(3), torch.ones(2, dtype=torch.bool), r"^mask .*as long as x"),
        (torch.zeros(3), torch.ones(3), r"^mask .*boolean"),
    ],
)
def test_masked_statistics_reject(function, x, mask, message):
    with pytest.raises(ValueError, match=message):
        function(x, mask)


# ------------------------------------------------------------------------------------------------ gaps


def test_gae_carries_over_a_gap_by_hand():
    """A tool's token in the middle and one at the end: whatever stands there, they are no steps."""
    mask = torch.tensor([False, True, False, True, False])
    rewards, values = torch.tensor([9.0, 1.0, 9.0, 2.0, 9.0]), torch.tensor([9.0, 1.0, 9.0, 4.0, 9.0])
    advantages, returns = gae(rewards, values, mask, lengths=torch.tensor([5]), gamma=0.5, gae_lambda=0.5)
    # delta = 1 + 4/2 - 1, 2 - 4 = 2, -2;  A = 2 - 2/4, -2
    assert advantages.tolist() == [0.0, 1.5, 0.0, -2.0, 0.0]
    assert returns.tolist() == [0.0, 2.5, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("seed", range(5))
def test_gae_of_a_gapped_batch_is_that_of_the_batch_without_what_is_in_the_gaps(seed):
    rewards, values, mask, lengths = ragged_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    gapped = mask & (torch.rand(mask.shape, generator=generator) < 0.6)
    options = {"gamma": 0.9, "gae_lambda": 0.8}
    found, returns = gae(rewards, values, gapped, lengths=lengths, **options)
    counts = tokens_in_mask(gapped, lengths)
    assert counts.tolist() == [int(part.sum()) for part in gapped.split(lengths.tolist())] and (counts == 0).any()
    every = torch.ones(int(gapped.sum()), dtype=torch.bool)
    alone, alone_returns = gae(rewards[gapped], values[gapped], every, lengths=counts, **options)
    assert torch.equal(found[gapped], alone) and torch.equal(returns[gapped], alone_returns)
    assert (found[~gapped] == 0).all() and (returns[~gapped] == 0).all()


# ------------------------------------------------------------------------------------------------ per sequence


def test_what_a_sequence_has_goes_to_its_tokens():
    mask = torch.tensor([False, True, True, False, False, True])
    spread = to_tokens(torch.tensor([2.0, 5.0, -1.0]), mask, lengths=torch.tensor([3, 1, 2]))
    assert spread.tolist() == [0.0, 2.0, 2.0, 0.0, 0.0, -1.0]


def test_discounted_returns_by_hand():
    """A gap is no step, and the next sequence is another."""
    mask = torch.tensor([False, True, False, True, True, True])
    rewards = torch.tensor([9.0, 1.0, 9.0, 2.0, 4.0, 8.0])
    options = {"lengths": torch.tensor([5, 1])}
    assert discounted_returns(rewards, mask, gamma=0.5, **options).tolist() == [0.0, 3.0, 0.0, 4.0, 4.0, 8.0]
    assert discounted_returns(rewards, mask, gamma=1.0, **options).tolist() == [0.0, 7.0, 0.0, 6.0, 4.0, 8.0]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_discounted_returns_equal_loops_over_gapped_sequences(gamma):
    rewards, _, mask, lengths = ragged_batch(7)
    mask = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(8)) < 0.7)
    expected, end = torch.zeros_like(rewards), 0
    for length in lengths.tolist():
        end, total = end + length, 0.0
        for t in reversed(range(end - length, end)):
            if mask[t]:
                expected[t] = total = rewards[t] + gamma * total
    found = discounted_returns(rewards, mask, lengths=lengths, gamma=gamma)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_length_adaptive_lambda_by_hand():
    """Below 1 / alpha tokens the formula is negative; a response without a token has none."""
    found = length_adaptive_lambda(torch.tensor([0, 1, 20, 40, 100, 2000]), alpha=0.05)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.5, 0.8, 0.99]


def test_gae_with_a_lambda_a_sequence_is_that_of_each_sequence_with_its_own():
    rewards, values, mask, lengths = ragged_batch(9)
    mask = mask & (torch.rand(mask.shape, generator=torch.Generator().manual_seed(10)) < 0.8)
    lambdas = torch.rand(len(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    found, returns = gae(rewards, values, mask, lengths=lengths, gamma=0.9, gae_lambda=lambdas)
    pieces = [x.split(lengths.tolist()) for x in (rewards, values, mask)]
    for i, (advantages, of_returns) in enumerate(
        zip(found.split(lengths.tolist()), returns.split(lengths.tolist()), strict=True)
    ):
        one = {"lengths": lengths[i : i + 1], "gamma": 0.9, "gae_lambda": float(lambdas[i])}
        expected, expected_returns = gae(*(piece[i] for piece in pieces), **one)
        torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_returns, expected_returns, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"^gae_lambda .*as long as lengths"):
        gae(rewards, values, mask, lengths=lengths, gamma=0.9, gae_lambda=lambdas[1:])


def test_sums_over_the_mask_of_each_sequence_by_hand():
    """The second has no token in the mask; what lies outside is not read."""
    x = torch.tensor([1.0, float("nan"), 4.0, float("inf"), 8.0])
    mask = torch.tensor([True, False, True, False, True])
    assert sequence_sums(x, mask, lengths=torch.tensor([3, 1, 1])).tolist() == [5.0, 0.0, 8.0]


def test_gae_takes_as_many_passes_as_its_longest_response() -> None:
    """3 for 64 responses of 5 to 8 tokens, where 512 tokens in one would take 9."""
    lengths = torch.tensor([5, 6, 7, 8] * 16)
    values = torch.randn(int(lengths.sum()), generator=torch.Generator().manual_seed(1))
    with CountedOperations() as counted:
        gae(values, values, values < 9, lengths=lengths, gamma=0.9, gae_lambda=0.9)
    assert counted.calls["aten::masked_fill_"] == 1 + 3  # once for the values of next tokens
