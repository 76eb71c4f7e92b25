"""Policy-gradient losses per token, and the quantities one watches beside them.

Nothing is reduced here: `loss_mean.py` says how tokens are weighed.
Outside the response log-probs and advantages are zero, and so is every loss.
"""

import torch
from torch import Tensor

from hybridflow.algorithms.checks import require_flat

MAX_LOG_RATIO = 20.0


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """How much likelier a token is under the policy being trained than under the one that it started from.

        r_t = exp(log pi_t - log pi_old_t)

    log r_t is held within +-20, so that exp and the gradient stay finite: an infinite ratio would reach the gradient as
    0 x inf even on the branch of a clipped loss that min discards.

    Args:
        log_probs: float (T,), of the policy being trained; the gradient flows through these.
        old_log_probs: float (T,), of the policy before this iteration's updates.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(log_probs=log_probs, old_log_probs=old_log_probs)
    return (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, sequences: Tensor) -> Tensor:
    """The geometric mean of a response's ratios, for each token of the response.

        s_i = exp(mean over t of i of (log pi_t - log pi_old_t))

    Zheng et al. 2025 (GSPO), arXiv 2507.18071, equation 7. A loss per token with `loss_mean.sequence_token_mean` then
    is the paper's loss per sequence: a response has it |o_i| times, each with 1 / |o_i|. Log s_i is held within +-20.

    Args:
        log_probs: float (T,), of the policy being trained; the gradient flows through these.
        old_log_probs: float (T,), of the policy before this iteration's updates.
        sequences: int64 (T,), the sequence that each token is of; all response tokens of a sequence have to be here.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(log_probs=log_probs, old_log_probs=old_log_probs, sequences=sequences)
    return sequence_means(log_probs - old_log_probs, sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_means(x: Tensor, sequences: Tensor) -> Tensor:
    """The mean of x over the tokens of the same sequence, for each token, float (T,). Arguments: float, int64 (T,)."""
    return _sequence_sums(x, sequences) / _sequence_sums(torch.ones_like(x), sequences)


def sequence_totals(x: Tensor, sequences: Tensor) -> Tensor:
    """The sum of x over the tokens of the same sequence, for each token, float (T,). Arguments: float, int64 (T,)."""
    return _sequence_sums(x, sequences)


def _sequence_sums(x: Tensor, sequences: Tensor) -> Tensor:
    index = _numbered(sequences)
    return x.new_zeros(len(x)).index_add(0, index, x)[index]


def _numbered(sequences: Tensor) -> Tensor:
    """(T,) int64: from 0, in the order of the given ones. To count them as `unique` does, the host waits for a GPU."""
    ordered, order = sequences.sort()
    begins = torch.zeros_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter_(0, order, begins.cumsum(0))


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """PPO's clipped surrogate, negated to be minimised.

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    Schulman et al. 2017, arXiv 1707.06347, equation 7; separate bounds: Yu et al. 2025, arXiv 2503.14476.

    Args:
        ratio: float (T,), r of `probability_ratio`; the gradient flows through it.
        advantages: float (T,).
        clip_low: the ratio is clipped below at 1 - clip_low, in [0, 1].
        clip_high: the ratio is clipped above at 1 + clip_high, >= 0.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(ratio=ratio, advantages=advantages)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped_ratio * advantages)


def dual_clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """The clipped surrogate, bounded also where the advantage is negative and the ratio large.

        L_t = min(L_clip_t, -dual_clip A_t) where A_t < 0, else L_clip_t

    with L_clip of `clipped_policy_loss`. Ye et al. 2020, arXiv 1912.09729.

    Args:
        ratio, advantages, clip_low, clip_high: as in `clipped_policy_loss`.
        dual_clip: c of the paper, > 1 + clip_high to leave the range of the first clip alone.

    Returns:
        float (T,), without gradient where the second bound holds.

    Raises:
        ValueError: the tensors are not both (T,).
    """
    loss = clipped_policy_loss(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo_policy_loss(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """REINFORCE, each token weighed by the token's ratio within bounds: no token loses the gradient.

        L_t = -stop(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi_t

    MiniMax 2025 (CISPO), arXiv 2506.13585, equation 4. The bounds are distances from 1, as in the other losses, where
    some code has the bounds themselves.

    Args:
        ratio: float (T,), r of `probability_ratio`; no gradient flows through it.
        log_probs: float (T,); the gradient flows through these.
        advantages: float (T,).
        clip_low: >= 0; from 1 on there is no lower bound.
        clip_high: >= 0.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(ratio=ratio, log_probs=log_probs, advantages=advantages)
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * log_probs


def sapo_policy_loss(ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """A soft gate in the place of the clip: the gradient fades as the ratio leaves 1, the faster the larger tau.

        L_t = -A_t sigmoid(tau_t (r_t - 1)) 4 / tau_t,    tau_t = tau_positive where A_t > 0, else tau_negative

    At r_t = 1 the gradient is that of `clipped_policy_loss`. Gao et al. 2025 (SAPO), arXiv 2511.20347.

    Args:
        ratio: float (T,), r of `probability_ratio`; the gradient flows through it.
        advantages: float (T,).
        tau_positive, tau_negative: > 0.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(ratio=ratio, advantages=advantages)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau


def reinforce_policy_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient: L_t = -A_t log pi_t. Williams 1992.

    Args:
        log_probs: float (T,); the gradient flows through these.
        advantages: float (T,).

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(log_probs=log_probs, advantages=advantages)
    return -advantages * log_probs


def clipped_tokens(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Where `clipped_policy_loss` takes the clipped branch, that is, where the token gives no gradient.

        c_t = (A_t > 0 and r_t > 1 + clip_high) or (A_t < 0 and r_t < 1 - clip_low)

    The mean of c over the response is the clip fraction. The second bound of the dual clip is not counted.

    Args:
        ratio, advantages, clip_low, clip_high: as in `clipped_policy_loss`.

    Returns:
        bool (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(ratio=ratio, advantages=advantages)
    low, high = clipped_low(ratio, advantages, clip_low=clip_low), clipped_high(ratio, advantages, clip_high=clip_high)
    return low | high


def clipped_low(ratio: Tensor, advantages: Tensor, *, clip_low: float) -> Tensor:
    """Those of `clipped_tokens` that have become too unlikely, bool (T,)."""
    return (advantages < 0) & (ratio < 1 - clip_low)


def clipped_high(ratio: Tensor, advantages: Tensor, *, clip_high: float) -> Tensor:
    """Those of `clipped_tokens` that have become too likely, bool (T,)."""
    return (advantages > 0) & (ratio > 1 + clip_high)


def approx_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Estimate, per token, of KL(pi_old || pi) from tokens sampled by pi_old: how far the update has moved.

        k3_t = r_t - 1 - log r_t,    log r_t = log pi_t - log pi_old_t

    Unbiased and never negative. Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.

    Args:
        log_probs: float (T,), of the policy being trained.
        old_log_probs: float (T,), of the policy before this iteration's updates.

    Returns:
        float (T,), detached; zero where the two agree.

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(log_probs=log_probs, old_log_probs=old_log_probs)
    log_ratio = (log_probs - old_log_probs).detach()
    return log_ratio.expm1() - log_ratio
