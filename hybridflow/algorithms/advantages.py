"""Advantage estimation on a packed batch: GAE, discounted sums, and masked statistics over all tokens."""

import torch
from torch import Tensor

from hybridflow.algorithms.checks import require_flat, require_lengths, require_mask
from hybridflow.algorithms.packed import count_masked, scatter_masked, select_masked, spread

WHITEN_EPS = 1e-8  # added to the variance


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    lengths: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, sequence by sequence.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = sum_{l >= 0} (gamma lambda)^l delta_{t+l}
        R_t     = A_t + V_t

    Steps are the response tokens alone: t + 1 is the next response token of the sequence, whatever a tool or an
    environment wrote in between. The sum ends with the last one; the state after it is terminal and has value 0.
    Schulman et al. 2016, arXiv 1506.02438, equations 11 to 16.

    Args:
        rewards: float (T,), the reward for token t.
        values: float (T,), V of the state before token t.
        response_mask: bool (T,), True on the response tokens, anywhere in their sequence.
        lengths: int64 (N,), tokens in each sequence, prompt included.
        gamma: discount, in [0, 1].
        gae_lambda: lambda, in [0, 1]; float (N,) gives each sequence a lambda.

    Returns:
        advantages and returns, float (T,), both zero outside the response, whatever the inputs hold there.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_flat(rewards=rewards, values=values, response_mask=response_mask)
    require_mask(response_mask=response_mask)
    require_lengths(lengths, rewards.shape[0])
    counts = tokens_in_mask(response_mask, lengths)
    remaining = _tokens_after(counts)  # (R,), of the steps alone, and so are deltas
    step_values = select_masked(values, response_mask)
    next_values = step_values.roll(-1).masked_fill_(remaining == 0, 0.0)
    deltas = next_values.mul_(gamma).add_(select_masked(rewards, response_mask)).sub_(step_values)
    discount = gamma * gae_lambda
    if isinstance(discount, Tensor):
        require_flat(lengths=lengths, gae_lambda=discount)
        discount = spread(discount.to(deltas.dtype), counts)
    longest = int(counts.max()) if len(counts) else 0
    sums = _discounted_suffix_sums(deltas, remaining, discount=discount, longest=longest)
    advantages = scatter_masked(sums, response_mask)
    return advantages, values.masked_fill(~response_mask, 0.0).add_(advantages)


def discounted_returns(rewards: Tensor, response_mask: Tensor, *, lengths: Tensor, gamma: float) -> Tensor:
    """What the response earns from each token on.

        G_t = sum_{k >= 0} gamma^k r_{t+k}

    Steps are the response tokens alone, as in `gae`. Williams 1992, "Simple statistical gradient-following algorithms".

    Args:
        rewards: float (T,), the reward for token t.
        response_mask: bool (T,).
        lengths: int64 (N,), tokens in each sequence.
        gamma: discount, in [0, 1].

    Returns:
        float (T,), zero outside the response.

    Raises:
        ValueError: as in `gae`.
    """
    nothing = torch.zeros_like(rewards)
    return gae(rewards, nothing, response_mask, lengths=lengths, gamma=gamma, gae_lambda=1.0)[0]


def length_adaptive_lambda(response_lengths: Tensor, *, alpha: float) -> Tensor:
    """A lambda for each sequence: the horizon 1 / (1 - lambda) is alpha times the response length.

        lambda_i = 1 - 1 / (alpha l_i), held within [0, 1]

    Yue et al. 2025 (VAPO), arXiv 2504.05118, with alpha = 0.05. Below l = 1 / alpha tokens the formula is negative:
    there lambda is 0, the one-step error.

    Args:
        response_lengths: int64 (N,), response tokens of each sequence.
        alpha: > 0.

    Returns:
        float64 (N,).

    Raises:
        ValueError: response_lengths is not (N,).
    """
    require_flat(response_lengths=response_lengths)
    return (1 - 1 / (alpha * response_lengths.double())).clamp(0.0, 1.0)


def to_tokens(per_sequence: Tensor, mask: Tensor, *, lengths: Tensor) -> Tensor:
    """Give every token of the mask the value of the token's sequence.

        y_t = x_i for t in sequence i, where m_t

    Args:
        per_sequence: (N,).
        mask: bool (T,).
        lengths: int64 (N,), tokens in each sequence.

    Returns:
        (T,), zero outside the mask.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_flat(per_sequence=per_sequence, lengths=lengths)
    require_mask(mask=mask)
    require_lengths(lengths, mask.shape[0])
    return spread(per_sequence, lengths).masked_fill_(~mask, 0)


def tokens_in_mask(mask: Tensor, lengths: Tensor) -> Tensor:
    """How many tokens of each sequence the mask selects.

    Args:
        mask: bool (T,).
        lengths: int64 (N,), tokens in each sequence.

    Returns:
        int64 (N,).

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_mask(mask=mask)
    require_lengths(lengths, mask.shape[0])
    return count_masked(mask, lengths)


def sequence_sums(x: Tensor, mask: Tensor, *, lengths: Tensor) -> Tensor:
    """The sum of x over the mask in each sequence.

    Args:
        x: float (T,), not read outside the mask.
        mask: bool (T,).
        lengths: int64 (N,), tokens in each sequence.

    Returns:
        float (N,).

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_flat(x=x, mask=mask)
    require_mask(mask=mask)
    require_lengths(lengths, mask.shape[0])
    rows, sums = spread(torch.arange(len(lengths)), lengths), torch.zeros(len(lengths), dtype=torch.float64)
    return sums.index_add_(0, rows, x.double().masked_fill(~mask, 0.0)).to(x.dtype)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where the mask is True: sum_t m_t x_t / sum_t m_t.

    Args:
        x: float, integer or bool (T,); a bool gives the fraction that is True. Not read outside the mask.
        mask: bool (T,).

    Returns:
        0-d tensor; NaN for a mask that selects nothing.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    require_flat(x=x, mask=mask)
    require_mask(mask=mask)
    return x.masked_fill(~mask, 0).sum() / mask.count_nonzero()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale x to mean 0 and standard deviation 1 over the whole mask.

        y_t = (x_t - mean) / sqrt(var + eps),    var = sum_t m_t (x_t - mean)^2 / (sum_t m_t - 1)

    The statistics are taken in float64, so that equal inputs give exact zeros. Whitening advantages
    over the batch is customary in PPO: Andrychowicz et al. 2020, arXiv 2006.05990.

    Args:
        x: float (T,), not read outside the mask.
        mask: bool (T,).

    Returns:
        float (T,), zero outside the mask; all zero when the mask selects one token.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    require_flat(x=x, mask=mask)
    require_mask(mask=mask)
    outside, number = ~mask, mask.count_nonzero()
    centred = x.masked_fill(outside, 0.0).double()
    centred = centred.sub_(centred.sum() / number).masked_fill_(outside, 0.0)
    variance = centred.square().sum() / (number - 1).clamp(min=1)
    return (centred * (variance + WHITEN_EPS).rsqrt()).to(x.dtype)


def _tokens_after(lengths: Tensor) -> Tensor:
    """How many tokens of the same sequence follow each token, int32 (T,)."""
    ends = spread(lengths.cumsum(0), lengths)
    return ends.sub_(torch.arange(1, len(ends) + 1)).int()


def _discounted_suffix_sums(x: Tensor, remaining: Tensor, *, discount: float | Tensor, longest: int) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each sequence: a scan of log2(longest) passes over the packed tensor.

    discount: one, or one a token, (T,), alike within a sequence. longest: tokens of the longest sequence.

    Before a pass y_t sums `shift` terms; adding discount^shift * y_{t+shift} makes them twice as many.
    """
    sums = x.clone()
    shift = 1
    while shift < longest:
        factor = discount[:-shift] if isinstance(discount, Tensor) else discount
        # The term is a new tensor, complete before the addition writes over what it read.
        sums[:-shift] += (factor * sums[shift:]).masked_fill_(remaining[:-shift] < shift, 0.0)
        shift, discount = 2 * shift, discount * discount
    return sums
