"""From a loss per token to one number: means over the global mini-batch, as weights of the tokens and a divisor.

    L = sum_t w_t L_t / d

Both are computed from the whole mini-batch. So replicas, micro-batches and pipeline stages change nothing: each adds
up the tokens that lie there. Weights are zero outside the response.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import to_tokens, tokens_in_mask
from hybridflow.algorithms.checks import require_flat, require_lengths, require_mask


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
    return LossMean(mask.float(), max(int(mask.count_nonzero()), 1))


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


def sequence_sum_mean(mask: Tensor, lengths: Tensor) -> LossMean:
    """The mean over sequences of the sum over their response tokens: that of a policy gradient, term by term.

        w_t = m_t,    d = number of sequences with a response token

    Arguments, result and errors as in `sequence_token_mean`.
    """
    return LossMean(mask.float(), max(int((tokens_in_mask(mask, lengths) > 0).sum()), 1))


def constant(mask: Tensor, lengths: Tensor, *, max_response_length: int) -> LossMean:
    """As `sequence_sum_mean`, over a length that is the same for every batch, however long the responses are.

        w_t = m_t,    d = number of sequences with a response token x max_response_length

    Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783.

    Args:
        mask: bool (T,), the response tokens.
        lengths: int64 (N,), tokens in each sequence.
        max_response_length: the limit that the responses were generated under, in tokens, > 0; not the longest of them.

    Returns:
        weights and divisor.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    weights, num_sequences = sequence_sum_mean(mask, lengths)
    return LossMean(weights, num_sequences * max_response_length)


def prompt_mean(mask: Tensor, lengths: Tensor, groups: Tensor) -> LossMean:
    """Every prompt counts alike: the mean over prompts of the mean over all response tokens of a prompt's responses.

        w_t = m_t / sum_{j in g} |o_j| for t in a response to prompt g,    d = number of prompts with a response token

    Responses to a prompt that lie in different mini-batches count as prompts of their own in each.

    Args:
        mask: bool (T,), the response tokens.
        lengths: int64 (N,), tokens in each sequence.
        groups: int64 (N,), the prompt that each sequence answers.

    Returns:
        weights and divisor; the divisor is at least 1.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_flat(lengths=lengths, groups=groups)
    unique, index = groups.unique(return_inverse=True)
    totals = torch.zeros_like(unique).index_add(0, index, tokens_in_mask(mask, lengths))
    shares = torch.where(totals > 0, 1.0 / totals, 0.0)[index]
    return LossMean(to_tokens(shares, mask, lengths=lengths), max(int((totals > 0).sum()), 1))
