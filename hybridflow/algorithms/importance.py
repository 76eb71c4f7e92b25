"""Between engine and trainer: weights for tokens that were sampled under probabilities other than the trainer's own.

    w_t = exp(log pi_t - log mu_t),    pi the trainer's policy before the updates, mu the engine's

The log-probs of one model differ between a training framework and an inference engine by rounding and kernels. Weights
are factors of a loss per token and detached. What a weight of zero takes out of the sum stays in the mean's divisor.
"""

from torch import Tensor

from hybridflow.algorithms.checks import require_flat
from hybridflow.algorithms.policy_loss import MAX_LOG_RATIO, sequence_means, sequence_totals


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


def sequence_importance_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, sequences: Tensor, *, cap: float
) -> Tensor:
    """One weight for all tokens of a response: the response's likelihood under the trainer over the engine's.

        w_i = min(exp(sum over t of i of (log pi_t - log mu_t)), cap)

    The unbiased correction of a gradient of whole responses, before the cap. The sum is held within +-20.

    Args:
        log_probs, rollout_log_probs, cap: as in `truncated_importance_weights`.
        sequences: int64 (T,), the sequence that each token is of; all response tokens of a sequence have to be here.

    Returns:
        float (T,), detached.

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(log_probs=log_probs, rollout_log_probs=rollout_log_probs, sequences=sequences)
    total = sequence_totals((log_probs - rollout_log_probs).detach(), sequences)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)


def geometric_band_weights(
    log_probs: Tensor, rollout_log_probs: Tensor, sequences: Tensor, *, low: float, high: float
) -> Tensor:
    """Responses on which engine and trainer differ too much are left out, others stay as they are.

        w_i = [low <= exp(mean over t of i of (log pi_t - log mu_t)) <= high]

    Args:
        log_probs, rollout_log_probs, sequences: as in `sequence_importance_weights`.
        low, high: the band, low <= 1 <= high.

    Returns:
        float (T,), 0 or 1.

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(log_probs=log_probs, rollout_log_probs=rollout_log_probs, sequences=sequences)
    mean = sequence_means((log_probs - rollout_log_probs).detach(), sequences).exp()
    return ((mean >= low) & (mean <= high)).to(log_probs.dtype)


def icepop_weights(log_probs: Tensor, rollout_log_probs: Tensor, *, low: float, high: float) -> Tensor:
    """Weights within a band; tokens outside of it have none.

        w_t = exp(log pi_t - log mu_t) where that lies in [low, high], else 0

    Ling team 2025 (IcePop), with 0.5 and 5.

    Args:
        log_probs, rollout_log_probs: as in `truncated_importance_weights`.
        low, high: the band, low <= 1 <= high.

    Returns:
        float (T,), detached.

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    weights = (log_probs - rollout_log_probs).detach().exp()
    return weights.masked_fill((weights < low) | (weights > high), 0.0)
