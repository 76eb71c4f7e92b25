"""Scores against the others of their prompt: by hand, against loops, and how one is made of another."""

import pytest
import torch

from hybridflow.algorithms.groups import (
    batch_std_advantages,
    centred_advantages,
    equal_groups,
    group_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_normalized_advantages,
)

SCORES, GROUPS = torch.tensor([1.0, 0.0, 2.0, 4.0, 3.0]), torch.tensor([7, 3, 7, 3, 7])  # means 2 and 2
ALL = (
    group_advantages,
    centred_advantages,
    batch_std_advantages,
    leave_one_out_advantages,
    mean_normalized_advantages,
    lambda scores, groups: length_weighted_advantages(scores, groups, torch.arange(len(scores)) + 1),
)


def random_groups(seed: int):
    """Scores (float64, not negative) and groups of 2 to 6, interleaved; response lengths, some 0."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(9).repeat_interleave(torch.randint(2, 7, (9,), generator=generator))
    groups = groups[torch.randperm(len(groups), generator=generator)] * 11 - 5
    scores = torch.rand(len(groups), dtype=torch.float64, generator=generator)
    return scores, groups, torch.randint(0, 30, (len(groups),), generator=generator)


def test_group_advantages_by_hand():
    """Groups 7 and 3, interleaved: scores 1, 2, 3 with mean 2 and std 1; 0 and 4 with mean 2 and std sqrt 8."""
    scores, groups = torch.tensor([1.0, 0.0, 2.0, 4.0, 3.0]), torch.tensor([7, 3, 7, 3, 7])
    expected = torch.tensor([-1.0, -(0.5**0.5), 0.0, 0.5**0.5, 1.0])
    torch.testing.assert_close(group_advantages(scores, groups), expected, rtol=2e-6, atol=0)
    assert group_advantages(scores, groups)[4].double() == pytest.approx(1 / (1 + 1e-6), rel=1e-7)  # eps is 1e-6


def test_a_group_of_equal_scores_has_advantages_of_exactly_zero():
    scores = torch.tensor([0.1] * 7 + [0.3, 0.7])
    assert group_advantages(scores, torch.tensor([0] * 7 + [1] * 2))[:7].tolist() == [0.0] * 7


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="group of one"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))


def test_centred_and_leave_one_out_by_hand():
    assert centred_advantages(SCORES, GROUPS).tolist() == [-1.0, -2.0, 0.0, 2.0, 1.0]
    assert leave_one_out_advantages(SCORES, GROUPS).tolist() == [-1.5, -4.0, 0.0, 4.0, 1.5]  # 1 - (2 + 3) / 2, 0 - 4


def test_the_spread_of_the_batch_by_hand():
    """All five have mean 2 and variance (1 + 4 + 0 + 4 + 1) / 4."""
    expected = torch.tensor([-1.0, -2.0, 0.0, 2.0, 1.0]) / 2.5**0.5
    torch.testing.assert_close(batch_std_advantages(SCORES, GROUPS), expected, rtol=2e-6, atol=0)


def test_the_baseline_weighted_by_length_by_hand():
    """Group 7: (1 x 1 + 2 x 2 + 1 x 3) / 4 = 2; group 3: (3 x 0 + 1 x 4) / 4 = 1."""
    found = length_weighted_advantages(SCORES, GROUPS, torch.tensor([1, 3, 2, 1, 1]))
    assert found.tolist() == [-1.0, -1.0, 0.0, 3.0, 1.0]


def test_a_group_without_a_token_has_no_length_weighted_advantage():
    assert length_weighted_advantages(SCORES, GROUPS, torch.tensor([0, 1, 0, 1, 0])).tolist() == [0.0, -2.0, 0, 2.0, 0]


def test_the_mean_as_the_unit_by_hand():
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0])  # means 1 and 0
    assert mean_normalized_advantages(scores, GROUPS).tolist() == [0.0, 0.0, -1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match=r"^scores has -0.5: none may be negative"):
        mean_normalized_advantages(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


@pytest.mark.parametrize("seed", range(3))
def test_each_equals_a_loop_over_the_responses(seed):
    scores, groups, lengths = random_groups(seed)
    raw = []
    for i, group in enumerate(groups.tolist()):
        of_group = [j for j in range(len(scores)) if groups[j] == group]
        r, mean = scores[of_group], scores[of_group].mean()
        others = [float(scores[j]) for j in of_group if j != i]
        tokens = sum(int(lengths[j]) for j in of_group)
        weighted = sum(int(lengths[j]) * float(scores[j]) for j in of_group) / max(tokens, 1)
        raw.append(
            {
                group_advantages: (scores[i] - mean) / (r.std() + 1e-6),
                centred_advantages: scores[i] - mean,
                batch_std_advantages: (scores[i] - mean) / (scores.std() + 1e-6),
                leave_one_out_advantages: scores[i] - sum(others) / len(others),
                mean_normalized_advantages: (scores[i] - mean) / mean,
                length_weighted_advantages: scores[i] - weighted if tokens else torch.tensor(0.0),
            }
        )
    expected = {function: torch.stack([one[function].double() for one in raw]) for function in raw[0]}
    more = {length_weighted_advantages: (lengths,)}
    for function, values in expected.items():
        found = function(scores, groups, *more.get(function, ()))
        torch.testing.assert_close(found, values, rtol=1e-10, atol=1e-12)


def test_without_the_spread_grpo_is_a_share_of_rloo():
    """(n - 1) / n of it in groups of n."""
    scores, groups, _ = random_groups(4)
    sizes = (groups[:, None] == groups).sum(1)
    share = leave_one_out_advantages(scores, groups) * (sizes - 1) / sizes
    torch.testing.assert_close(centred_advantages(scores, groups), share)


def test_with_equal_lengths_the_weighted_baseline_is_the_mean():
    scores, groups, _ = random_groups(5)
    weighted = length_weighted_advantages(scores, groups, torch.full_like(groups, 7))
    torch.testing.assert_close(weighted, centred_advantages(scores, groups))


@pytest.mark.parametrize("function", ALL)
def test_every_one_gives_zeros_for_equal_scores_and_refuses_a_group_of_one(function):
    groups = torch.tensor([0] * 7 + [1] * 2)
    assert function(torch.tensor([0.1] * 7 + [0.3, 0.7]), groups)[:7].abs().max() <= 1e-15  # exact, but for a whitened
    assert function(torch.full((9,), 0.1), groups).tolist() == [0.0] * 9
    with pytest.raises(ValueError, match=r"^groups has a group of one"):
        function(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"must be as long as|must have one dimension"):
        function(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0]))


def test_equal_groups_by_hand():
    """Groups 3 (equal), 5 (one response), 7 (not equal), 8 (equal)."""
    scores = torch.tensor([0.1, 1.0, 0.1, 2.0, 0.0, 2.0, 1.0])
    assert equal_groups(scores, torch.tensor([3, 7, 3, 8, 7, 8, 5])).tolist() == [True, False, False, True]
