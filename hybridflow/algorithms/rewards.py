"""From one score a sequence to one reward a token, and the shaping of scores on the way.

Scores are float (N,). "Normalised" means (score - mean) / (std + eps) with the unbiased variance, taken in
float64 so that equal scores give zeros.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import tokens_in_mask
from hybridflow.algorithms.checks import require_flat, require_lengths, require_mask, require_nonempty
from hybridflow.algorithms.packed import last_masked

SCORE_EPS = 1e-6  # added to the standard deviation


def token_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, *, lengths: Tensor, kl_coef: float) -> Tensor:
    """A KL penalty on every response token, and the score on the last one.

        r_t = -kl_coef KL_t + [t is the last response token of sequence i] s_i

    Ziegler et al. 2019, arXiv 1909.08593, equation 2, with the penalty spread over the tokens it is a sum of.

    Args:
        scores: float (N,).
        kl: float (T,), an estimate per token (see `kl.py`); not read outside the response.
        response_mask: bool (T,), True on the response tokens, anywhere in their sequence.
        lengths: int64 (N,), tokens in each sequence, prompt included.
        kl_coef: factor of the penalty, >= 0.

    Returns:
        float (T,), of kl's dtype, zero outside the response. A sequence without response tokens earns nothing.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_flat(kl=kl, response_mask=response_mask)
    require_flat(lengths=lengths, scores=scores)
    require_mask(response_mask=response_mask)
    require_lengths(lengths, kl.shape[0])
    rewards = (-kl_coef * kl).masked_fill_(~response_mask, 0.0)
    counts = tokens_in_mask(response_mask, lengths)
    last = last_masked(response_mask, counts)
    return rewards.index_add_(0, last, scores[counts > 0].to(kl.dtype))


def clip_scores(scores: Tensor, limit: float) -> Tensor:
    """Hold scores within a symmetric range: min(max(s_i, -limit), limit).

    Args:
        scores: float (N,).
        limit: half-width of the range, > 0.

    Returns:
        float (N,).

    Raises:
        ValueError: scores is not (N,).
    """
    require_flat(scores=scores)
    return scores.clamp(-limit, limit)


def batch_normalized(scores: Tensor) -> Tensor:
    """Scores relative to their own batch.

        (s_i - mean) / (std + eps),    std^2 = sum_i (s_i - mean)^2 / (N - 1)

    Args:
        scores: float (N,), N >= 1.

    Returns:
        float (N,); zero for equal scores, and for a single one.

    Raises:
        ValueError: scores is not (N,), or is empty.
    """
    require_flat(scores=scores)
    require_nonempty(scores=scores)
    centred = scores.double() - scores.double().mean()
    std = (centred.square().sum() / max(scores.shape[0] - 1, 1)).sqrt()
    return (centred / (std + SCORE_EPS)).to(scores.dtype)


def penalize_truncated(scores: Tensor, truncated: Tensor, *, penalty: float) -> Tensor:
    """Subtract a constant from the score of every response that was cut at the length limit.

        s_i - penalty [truncated_i]

    Args:
        scores: float (N,).
        truncated: bool (N,), True where the limit ended the response.
        penalty: what a cut costs, in units of the score, >= 0.

    Returns:
        float (N,).

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    require_flat(scores=scores, truncated=truncated)
    require_mask(truncated=truncated)
    return torch.where(truncated, scores - penalty, scores)


def overlong_penalties(response_lengths: Tensor, *, max_response_length: Tensor, buffer: int, factor: float) -> Tensor:
    """What the last tokens before the length limit cost: nothing up to the buffer, then more with each token.

        p_i = factor min(max(l_i - (max_response_length - buffer), 0), buffer) / buffer

    Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 13, where it is added to the score with the sign turned.

    Args:
        response_lengths: int64 (N,), response tokens of each sequence.
        max_response_length: int64 (N,), tokens: the limit that each response was generated under.
        buffer: tokens, in 1 .. the smallest of those limits.
        factor: what a response of the full length costs, in units of the score, >= 0.

    Returns:
        float32 (N,), to be taken off the scores.

    Raises:
        ValueError: a shape is not as above, or the buffer is not.
    """
    require_flat(response_lengths=response_lengths, max_response_length=max_response_length)
    if buffer < 1 or (max_response_length < buffer).any():
        least = int(max_response_length.min())
        raise ValueError(f"buffer is {buffer}: it must be in 1 .. max_response_length, {least}")
    over = (response_lengths - (max_response_length - buffer)).clamp(0, buffer)
    return factor * over.float() / buffer


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of all scores seen so far: floats, fit for a checkpoint.

    Merging a batch b into what was seen, a:

        mean = mean_a + delta n_b / n,    M2 = M2_a + M2_b + delta^2 n_a n_b / n,    delta = mean_b - mean_a

    Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".

    Args:
        count: n, scores seen.
        mean: their mean.
        m2: M2, the sum of their squared deviations from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 before the second score."""
        return math.sqrt(self.m2 / max(self.count - 1, 1.0))

    def updated(self, scores: Tensor) -> Self:
        """The moments of everything seen before and of scores, float (N,), N >= 1.

        Raises:
            ValueError: scores is not (N,), or is empty.
        """
        require_flat(scores=scores)
        require_nonempty(scores=scores)
        batch = scores.detach().double()
        batch_count, batch_mean = float(batch.shape[0]), float(batch.mean())
        batch_m2 = float((batch - batch_mean).square().sum())
        count, delta = self.count + batch_count, batch_mean - self.mean
        return type(self)(
            count=count,
            mean=self.mean + delta * batch_count / count,
            m2=self.m2 + batch_m2 + delta**2 * self.count * batch_count / count,
        )

    def normalized(self, scores: Tensor) -> Tensor:
        """(s_i - mean) / (std + eps), float (N,). Update first: a spread not yet seen makes the result large.

        Raises:
            ValueError: scores is not (N,), or nothing has been seen yet.
        """
        require_flat(scores=scores)
        if self.count == 0:
            raise ValueError(f"count is {self.count}: update with scores before normalising any")
        return ((scores.double() - self.mean) / (self.std + SCORE_EPS)).to(scores.dtype)
