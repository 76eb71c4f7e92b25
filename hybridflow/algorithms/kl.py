"""How far the policy is from the reference: estimators per token, and controllers of the coefficient.

The estimators take tokens sampled from the policy pi and estimate KL(pi || ref).
With d = log pi_t - log ref_t:

    name  value            as an estimate            expected gradient when used as a loss
    k1    d                unbiased, of either sign  zero: the score function has mean 0
    k2    d^2 / 2          biased, never negative    that of KL(pi || ref)
    k3    exp(-d) - 1 + d  unbiased, never negative  that of KL(ref || pi)
    k3+   that of k3       unbiased, never negative  that of k2

The gradient is the one autograd gives: through log pi, with the sampled tokens held fixed. In the reward
(where no gradient flows) k1 and k3 are the choices. As a loss, k2 and k3+ give the gradient of KL(pi || ref); the
value of k3+ is that of k3.
Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from torch import Tensor

from hybridflow.algorithms.checks import require_flat

MAX_RELATIVE_ERROR = 0.2


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The log-ratio itself.

        k1_t = log pi_t - log ref_t

    Unbiased for KL(pi || ref), of high variance, negative for some tokens. The gradient as a loss is
    grad log pi_t, whose expectation is zero: for use in the reward, not as a loss.

    Args:
        log_probs: float (T,), log pi of the sampled tokens.
        ref_log_probs: float (T,), log ref of the same tokens.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return log_probs - ref_log_probs


def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Half the squared log-ratio.

        k2_t = (log pi_t - log ref_t)^2 / 2

    Biased for KL(pi || ref), by little where the two are close. The gradient as a loss is
    (log pi_t - log ref_t) grad log pi_t, whose expectation is exactly the gradient of KL(pi || ref).

    Args:
        log_probs: float (T,), log pi of the sampled tokens.
        ref_log_probs: float (T,), log ref of the same tokens.

    Returns:
        float (T,), never negative.

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return 0.5 * (log_probs - ref_log_probs).square()


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The log-ratio with a control variate of mean zero.

        k3_t = ref_t / pi_t - 1 - log(ref_t / pi_t)

    Unbiased for KL(pi || ref), of low variance where the two are close; one token can be very large where
    ref_t >> pi_t. The gradient as a loss is (1 - ref_t / pi_t) grad log pi_t, whose expectation is the
    gradient of the other divergence, KL(ref || pi).

    Args:
        log_probs: float (T,), log pi of the sampled tokens.
        ref_log_probs: float (T,), log ref of the same tokens.

    Returns:
        float (T,), never negative.

    Raises:
        ValueError: the tensors are not both (T,).
    """
    require_flat(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_ratio = ref_log_probs - log_probs
    return log_ratio.expm1() - log_ratio


def kl_k3_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: an unbiased estimate whose pull is on the same divergence.

        k2_t + stop(k3_t - k2_t)

    Args:
        log_probs: float (T,), log pi of the sampled tokens.
        ref_log_probs: float (T,), log ref of the same tokens.

    Returns:
        float (T,), never negative up to rounding.

    Raises:
        ValueError: the tensors are not both (T,).
    """
    k2 = kl_k2(log_probs, ref_log_probs)
    return k2 + (kl_k3(log_probs, ref_log_probs) - k2).detach()


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "k3+": kl_k3_plus}
)


@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient steered so that the observed KL approaches a target.

        e = clip(KL / target - 1, -0.2, 0.2)
        coef <- coef (1 + e num_sequences / horizon)

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2, whose constant K is num_sequences / horizon here.

    Args:
        coef: factor of the KL penalty, >= 0; 0 stays 0.
        target: the KL to approach, in the unit that `updated` is given, > 0.
        horizon: sequences over which an error of e changes the coefficient by a factor of about exp(e), > 0;
            one batch must stay below 5 horizons, or a step down could pass zero.

    Raises:
        ValueError: target or horizon is not positive.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")

    def updated(self, kl_mean: float, num_sequences: int) -> Self:
        """The controller after one batch.

        Args:
            kl_mean: observed KL, the mean over the batch.
            num_sequences: sequences in the batch.

        Raises:
            ValueError: kl_mean is NaN, or the batch is not below 5 horizons.
        """
        if math.isnan(kl_mean):
            raise ValueError(f"kl_mean is {kl_mean}: it must be a number")
        if MAX_RELATIVE_ERROR * num_sequences >= self.horizon:
            raise ValueError(f"num_sequences is {num_sequences}: it must be below 5 times horizon, {self.horizon}")
        error = min(max(kl_mean / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        return replace(self, coef=self.coef * (1 + error * num_sequences / self.horizon))
