"""What n responses to each prompt say of a model: avg@k, pass@k and majority@k.

    avg@k       the mean over prompts of c / n, where c of n responses are right
    pass@k      the mean over prompts of 1 - C(n - c, k) / C(n, k)      Chen et al. 2021, arXiv 2107.03374
    majority@k  the share of prompts whose most frequent answer is right      Wang et al. 2022, arXiv 2203.11171

Responses lie side by side, prompt after prompt: (P, n).
"""

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def avg_at_k(right: Tensor) -> Tensor:
    """The share of right responses.

    Args:
        right: bool (P, k).

    Returns:
        float32 (P,).

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    _require_right(right)
    return right.float().mean(1)


def pass_at_k(right: Tensor, k: int) -> Tensor:
    """The probability that at least one of k responses is right: an unbiased estimate from n >= k responses.

        1 - C(n - c, k) / C(n, k)

    Binomials are whole numbers, so one division rounds and nothing overflows.

    Args:
        right: bool (P, n), c of each prompt are true.
        k: 1 .. n.

    Returns:
        float64 (P,).

    Raises:
        ValueError: a shape or dtype is not as above, or k is not within 1 .. n.
    """
    _require_right(right)
    n = right.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} is not within 1 .. n = {n}")
    all_ways = math.comb(n, k)
    return torch.tensor([1.0 - math.comb(n - c, k) / all_ways for c in right.sum(1).tolist()], dtype=torch.float64)


def majority_at_k(right: Tensor, answers: Sequence[Sequence[Hashable | None]]) -> Tensor:
    """Whether the most frequent answer of each prompt is right. Of equally frequent ones the first counts.

    The first response with that answer says whether the answer is right.

    Args:
        right: bool (P, k).
        answers: P lists of k. None is no answer and has no vote. A prompt without an answer is wrong.

    Returns:
        bool (P,).

    Raises:
        ValueError: a shape or dtype is not as above, or answers have another shape.
    """
    _require_right(right)
    shape = (len(answers), *sorted({len(own) for own in answers}))
    if shape != tuple(right.shape):
        raise ValueError(f"answers have the shape {shape}, right has {tuple(right.shape)}")
    firsts = [_most_frequent(own) for own in answers]
    return torch.tensor(
        [first is not None and bool(own[first]) for first, own in zip(firsts, right, strict=True)], dtype=torch.bool
    )


def _most_frequent(answers: Sequence[Hashable | None]) -> int | None:
    """Where the most frequent answer stands first; None where there is no answer."""
    votes: dict[Hashable, int] = {}
    for answer in answers:
        if answer is not None:
            votes[answer] = votes.get(answer, 0) + 1
    return answers.index(max(votes, key=lambda answer: votes[answer])) if votes else None


def _require_right(right: Tensor) -> None:
    if right.dtype != torch.bool or right.dim() != 2 or 0 in right.shape:
        raise ValueError(f"right: {right.dtype} {tuple(right.shape)}, expected bool (P, n), neither of them 0")
