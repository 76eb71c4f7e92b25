"""Scores of responses relative to the others of the same prompt: the advantages of algorithms without a critic.

    scores (N,)   the score of each response
    groups (N,)   the prompt that each response answers, int64; responses of a prompt need not stand side by side

Everything is taken in float64, so that a group of equal scores gives exact zeros. A group of one is an error: nothing
is left to compare it with.
"""

import torch
from torch import Tensor

from hybridflow.algorithms.checks import require_flat

GROUP_EPS = 1e-6  # added to a standard deviation


def group_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores relative to the other responses of the same prompt, in units of their spread.

        A_i = (r_i - mean) / (std + eps),    std^2 = sum_j (r_j - mean)^2 / (n - 1),    j over the n of i's group

    Shao et al. 2024, arXiv 2402.03300, section 4.1.2 (outcome supervision). eps is 1e-6, where public code has 1e-9 to
    1e-4.

    Args:
        scores: float (N,).
        groups: int64 (N,), the prompt that each response answers.

    Returns:
        float (N,).

    Raises:
        ValueError: a shape is not as above, or a group has one response: it would have no spread.
    """
    centred, index, counts = _centred(scores, groups)
    std = (_sums(centred.square(), index, counts) / (counts - 1)).sqrt()
    return (centred / (std[index] + GROUP_EPS)).to(scores.dtype)


def centred_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores relative to the mean of their group: A_i = r_i - mean.

    Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783, whose other half is `loss_mean.constant`. Arguments, result and errors
    as in `group_advantages`.
    """
    return _centred(scores, groups)[0].to(scores.dtype)


def batch_std_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """The mean is the group's, the spread that of all scores of the batch.

        A_i = (r_i - mean) / (std + eps),    std^2 = sum_j (r_j - batch mean)^2 / (N - 1),    j over all N

    Liu et al. 2025, arXiv 2508.08221. Arguments, result and errors as in `group_advantages`.
    """
    centred = _centred(scores, groups)[0]
    return (centred / (scores.double().std() + GROUP_EPS)).to(scores.dtype)


def leave_one_out_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores relative to the mean of the others of their group.

        A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) (r_i - mean)

    Ahmadian et al. 2024 (RLOO), arXiv 2402.14740. Arguments, result and errors as in `group_advantages`.
    """
    centred, index, counts = _centred(scores, groups)
    return (centred * (counts / (counts - 1.0).double())[index]).to(scores.dtype)


def length_weighted_advantages(scores: Tensor, groups: Tensor, response_lengths: Tensor) -> Tensor:
    """Scores relative to the baseline of least variance, if a response's gradient grows with the response's length.

        A_i = r_i - sum_j l_j r_j / sum_j l_j,    j over i's group

    Hao et al. 2025 (OPO), arXiv 2505.23585.

    Args:
        scores, groups: as in `group_advantages`.
        response_lengths: int64 (N,), response tokens of each sequence, >= 0.

    Returns:
        float (N,); zero throughout a group without a token.

    Raises:
        ValueError: as in `group_advantages`.
    """
    require_flat(scores=scores, response_lengths=response_lengths)
    index, counts = _groups(scores, groups)
    lengths = response_lengths.double()
    total = _sums(lengths, index, counts)
    shift = _means(scores.double(), index, counts)  # a baseline moves with the scores: equal scores leave zeros
    apart = scores.double() - shift[index]
    baseline = _sums(lengths * apart, index, counts) / total.clamp(min=1.0)
    return torch.where(total[index] > 0, apart - baseline[index], 0.0).to(scores.dtype)


def mean_normalized_advantages(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores relative to the mean of their group, in units of it.

        A_i = (r_i - mean) / mean,    0 in a group whose scores are all 0

    MaxRL, arXiv 2602.02710.

    Args:
        scores: float (N,), none of them negative: a mean below zero would turn the sign around.
        groups: int64 (N,).

    Returns:
        float (N,).

    Raises:
        ValueError: as in `group_advantages`, or a score is negative.
    """
    if (scores < 0).any():
        raise ValueError(f"scores has {float(scores.min())}: none may be negative where their mean divides")
    centred, index, counts = _centred(scores, groups)
    means = _means(scores.double(), index, counts)[index]
    return torch.where(means > 0, centred / means.where(means > 0, 1.0), 0.0).to(scores.dtype)


def equal_groups(scores: Tensor, groups: Tensor) -> Tensor:
    """Which groups have one and the same score throughout, and so nothing to learn from.

    Args:
        scores: float (N,).
        groups: int64 (N,).

    Returns:
        bool, one a group, by ascending group; a group of one is not equal to others, and so not among them.

    Raises:
        ValueError: the tensors are not both (N,).
    """
    require_flat(scores=scores, groups=groups)
    unique: tuple[Tensor, Tensor, Tensor] = groups.unique(return_inverse=True, return_counts=True)
    _, index, counts = unique
    largest = torch.full(counts.shape, -torch.inf, device=scores.device, dtype=scores.dtype)
    smallest = -largest
    largest = largest.scatter_reduce(0, index, scores, "amax")
    smallest = smallest.scatter_reduce(0, index, scores, "amin")
    return (largest == smallest) & (counts > 1)


def _groups(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each response's group, (N,), and the size of each group."""
    require_flat(scores=scores, groups=groups)
    unique: tuple[Tensor, Tensor, Tensor] = groups.unique(return_inverse=True, return_counts=True)
    _, index, counts = unique
    if (counts < 2).any():
        raise ValueError("groups has a group of one: give each prompt at least two responses to compare")
    return index, counts


def _sums(x: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(len(counts), dtype=torch.float64, device=x.device).index_add(0, index, x)


def _means(x: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return _sums(x, index, counts) / counts


def _centred(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r_i - mean in float64, the number of each response's group, the size of each group."""
    index, counts = _groups(scores, groups)
    return scores.double() - _means(scores.double(), index, counts)[index], index, counts
