"""Advantage estimation on a packed batch: GAE, and masked statistics over all its tokens."""

import torch
from torch import Tensor

from hybridflow.algorithms._shapes import require_flat, require_lengths, require_mask

WHITEN_EPS = 1e-8  # added to the variance


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    lengths: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, sequence by sequence.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = sum_{l >= 0} (gamma lambda)^l delta_{t+l}
        R_t     = A_t + V_t

    The sum ends with the sequence; the state after its last token is terminal and has value 0.
    Schulman et al. 2016, arXiv 1506.02438, equations 11 to 16.

    Args:
        rewards: float (T,), the reward for token t.
        values: float (T,), V of the state before token t.
        response_mask: bool (T,), True on the run of response tokens that ends each sequence.
        lengths: int64 (N,), tokens in each sequence, prompt included.
        gamma: discount, in [0, 1].
        gae_lambda: lambda, in [0, 1].

    Returns:
        advantages and returns, float (T,), both zero outside the response, whatever the inputs hold there.

    Raises:
        ValueError: a shape or dtype is not as above, or lengths does not sum to T.
    """
    require_flat(rewards=rewards, values=values, response_mask=response_mask)
    require_mask(response_mask=response_mask)
    require_lengths(lengths, rewards.shape[0])
    remaining = _tokens_after(lengths, rewards.shape[0])
    next_values = torch.where(remaining > 0, values.roll(-1), 0.0)
    deltas = (rewards + gamma * next_values - values).masked_fill(~response_mask, 0.0)
    sums = _discounted_suffix_sums(deltas, remaining, discount=gamma * gae_lambda)
    advantages = sums.masked_fill(~response_mask, 0.0)
    return advantages, advantages + values.masked_fill(~response_mask, 0.0)


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
    return x.masked_fill(~mask, 0).sum() / mask.sum()


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
    centred = (x.double() - masked_mean(x.double(), mask)).masked_fill(~mask, 0.0)
    variance = centred.square().sum() / (mask.sum() - 1).clamp(min=1)
    return (centred * (variance + WHITEN_EPS).rsqrt()).to(x.dtype)


def _tokens_after(lengths: Tensor, num_tokens: int) -> Tensor:
    """How many tokens of the same sequence follow each token, int64 (T,)."""
    ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=num_tokens)
    return ends - 1 - torch.arange(num_tokens, device=lengths.device)


def _discounted_suffix_sums(x: Tensor, remaining: Tensor, *, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} within each sequence: a scan of log2(T) passes over the packed tensor.

    Before a pass y_t sums `shift` terms; adding discount^shift * y_{t+shift} makes them twice as many.
    """
    sums = x.clone()
    shift = 1
    while shift < sums.shape[0]:
        # The right side is a new tensor, complete before the addition writes over what it read.
        sums[:-shift] += torch.where(remaining[:-shift] >= shift, discount * sums[shift:], 0.0)
        shift, discount = 2 * shift, discount * discount
    return sums
