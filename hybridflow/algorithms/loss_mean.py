"""From a loss per token to one number: means over the global mini-batch, as weights of its tokens and a divisor.

    L = sum_t w_t L_t / d

Both are computed from the whole mini-batch, so that replicas, micro-batches and pipeline stages, each of which adds up
its own tokens, change nothing. Weights are zero outside the response.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms._shapes import require_lengths, require_mask
from hybridflow.algorithms.advantages import to_tokens, tokens_in_mask


class LossMean(NamedTuple):
    weights: Tensor  # float32 (T,)
    divisor: int


def token_mean(mask: Tensor, lengths: Tensor) -> LossMean:
    """Every response token of the mini-batch counts alike.

        w_t = m_t,    d = sum_t m_t

    Args:
        mask: bool (T,), the response tokens.
        lengths: int64 (N,), tokens in each sequence.

    Returns:
        weights and divisor; the divisor is at least 1.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_mask(mask=mask)
    require_lengths(lengths, mask.shape[0])
    return LossMean(mask.float(), max(int(mask.sum()), 1))


def token_sum(mask: Tensor, lengths: Tensor) -> LossMean:
    """No mean at all: w_t = m_t, d = 1. Arguments and errors as in `token_mean`."""
    return LossMean(token_mean(mask, lengths).weights, 1)


def sequence_token_mean(mask: Tensor, lengths: Tensor) -> LossMean:
    """Every sequence counts alike: the mean over sequences of the mean over their response tokens.

        w_t = m_t / |o_i| for t in sequence i,    d = number of sequences with a response token

    Shao et al. 2024, arXiv 2402.03300, equation 3.

    Args:
        mask: bool (T,), the response tokens.
        lengths: int64 (N,), tokens in each sequence.

    Returns:
        weights and divisor; the divisor is at least 1.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    counts = tokens_in_mask(mask, lengths)
    shares = torch.where(counts > 0, 1.0 / counts, 0.0)
    return LossMean(to_tokens(shares, mask, lengths=lengths), max(int((counts > 0).sum()), 1))
