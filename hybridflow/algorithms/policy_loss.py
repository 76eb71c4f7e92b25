"""Policy-gradient losses per token, and the quantities one watches beside them.

Nothing is reduced here: `loss_mean.py` says how tokens are weighed.
Outside the response log-probs and advantages are zero, and so is every loss.
"""

import torch
from torch import Tensor

from hybridflow.algorithms._shapes import require_flat

MAX_LOG_RATIO = 20.0


def probability_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """How much likelier a token is under the policy being trained than under the one that it started from.

        r_t = exp(log pi_t - log pi_old_t)

    log r_t is held within +-20, so that exp and its gradient stay finite: an infinite ratio would reach the gradient as
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


def clipped_tokens(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Where `clipped_policy_loss` takes its clipped branch, that is, where the token gives no gradient.

        c_t = (A_t > 0 and r_t > 1 + clip_high) or (A_t < 0 and r_t < 1 - clip_low)

    Its mean over the response is the clip fraction. The second bound of the dual clip is not counted.

    Args:
        ratio, advantages, clip_low, clip_high: as in `clipped_policy_loss`.

    Returns:
        bool (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(ratio=ratio, advantages=advantages)
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    return too_high | too_low


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


def truncated_importance_weights(log_probs: Tensor, rollout_log_probs: Tensor, *, cap: float) -> Tensor:
    """Weights that correct for tokens sampled under probabilities other than the trainer's own.

        w_t = min(exp(log pi_t - log mu_t), cap)

    Ionides 2008, "Truncated Importance Sampling"; per step: Espeholt et al. 2018, arXiv 1802.01561.

    Args:
        log_probs: float (T,), log pi, computed by the trainer.
        rollout_log_probs: float (T,), log mu, reported by the engine that sampled.
        cap: upper bound of a weight, >= 1.

    Returns:
        float (T,), detached: factors for a per-token loss; 1 outside the response.

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    return (log_probs - rollout_log_probs).detach().exp().clamp(max=cap)
