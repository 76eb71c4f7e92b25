"""avg@k, pass@k and majority@k of few responses, counted by hand."""

from itertools import combinations

import pytest
import torch

from hybridflow.algorithms.evaluation import avg_at_k, majority_at_k, pass_at_k

# of four responses to each of four prompts 0, 1, 2 and 4 are right
RIGHT = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)


def test_avg_at_k_is_the_share_that_is_right() -> None:
    assert avg_at_k(RIGHT).tolist() == [0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [0.0, 1 / 4, 1 / 2, 1.0]),  # avg@4
        (2, [0.0, 1 / 2, 5 / 6, 1.0]),  # of six pairs three have the right one; one pair of six has none of two
        (3, [0.0, 3 / 4, 1.0, 1.0]),
        (4, [0.0, 1.0, 1.0, 1.0]),  # whether any is right
    ],
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(k: int, expected: list[float]) -> None:
    assert pass_at_k(RIGHT, k).tolist() == pytest.approx(expected, abs=1e-15)
    for own, found in zip(RIGHT.tolist(), pass_at_k(RIGHT, k).tolist(), strict=True):
        draws = list(combinations(own, k))
        assert found == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits() -> None:
    """One of 2000 is right: the probability that k draws have the one is k / 2000."""
    right = torch.zeros(1, 2000, dtype=torch.bool)
    right[0, 7] = True
    assert pass_at_k(right, 1000).tolist() == [0.5]
    assert pass_at_k(right, 1).tolist() == pytest.approx([1 / 2000], rel=1e-12)
    assert pass_at_k(right, 2000).tolist() == [1.0]


def test_majority_at_k_asks_the_most_frequent_answer() -> None:
    answers = [["7", "7", "8", "9"], ["7", "8", "8", "9"], [None, None, None, "3"], [None, None, None, None]]
    right = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert majority_at_k(right, answers).tolist() == [False, True, True, False]


def test_of_equally_frequent_answers_the_first_counts() -> None:
    right = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    assert majority_at_k(right, [["a", "b", "b", "a"], ["b", "a", "a", "b"]]).tolist() == [False, True]
    assert majority_at_k(right, [list("wxyz"), list("wxyz")]).tolist() == [False, True]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match=r"k = 5 is not within 1 .. n = 4"):
        pass_at_k(RIGHT, 5)
    with pytest.raises(ValueError, match=r"right: torch.float32 \(4, 4\)"):
        avg_at_k(RIGHT.float())
    with pytest.raises(ValueError, match=r"answers have the shape \(1, 4\), right has \(4, 4\)"):
        majority_at_k(RIGHT, [["a"] * 4])
