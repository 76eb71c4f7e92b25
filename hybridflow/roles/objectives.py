"""What the actor and the critic minimise, per token, out of the functions in `algorithms/`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from torch import Tensor

from hybridflow.algorithms.kl import KL_ESTIMATORS
from hybridflow.algorithms.policy_loss import (
    approx_kl,
    clipped_policy_loss,
    clipped_tokens,
    dual_clipped_policy_loss,
    truncated_importance_weights,
)
from hybridflow.algorithms.value_loss import clipped_value_loss, squared_value_loss
from hybridflow.config import AlgorithmConfig

Results = dict[str, Tensor]


@dataclass(frozen=True)
class OldTokens:
    """What was known of r response tokens before the update: all (r,) float32."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class PolicyObjective:
    """policy loss x importance weight - entropy_coef x entropy + kl_coef x KL(pi, reference)."""

    policy_loss: Callable[..., Tensor]
    clip_low: float
    clip_high: float
    importance_cap: float | None
    entropy_coef: float
    kl: Callable[[Tensor, Tensor], Tensor] | None  # None: no KL in the loss

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Self:
        low, high = config.clip_range, config.clip_range_high or config.clip_range
        loss = partial(clipped_policy_loss, clip_low=low, clip_high=high)
        if config.dual_clip is not None:
            loss = partial(dual_clipped_policy_loss, clip_low=low, clip_high=high, dual_clip=config.dual_clip)
        kl = KL_ESTIMATORS[config.kl.estimator] if config.kl.use == "loss" else None
        return cls(loss, low, high, config.importance_cap, config.entropy_coef, kl)

    def __call__(self, log_probs: Tensor, entropy: Tensor, old: OldTokens, kl_coef: float) -> tuple[Tensor, Results]:
        """The summed loss over the tokens, and the sums of what is worth knowing of them."""
        loss = self.policy_loss(log_probs, old.log_probs, old.advantages)
        if self.importance_cap is not None:
            loss = loss * truncated_importance_weights(old.log_probs, old.rollout_log_probs, cap=self.importance_cap)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        if self.kl is not None:
            loss = loss + kl_coef * self.kl(log_probs, old.ref_log_probs)
        clipped = clipped_tokens(
            log_probs, old.log_probs, old.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        total = loss.sum()
        return total, {
            "loss": total.detach(),
            "entropy": entropy.detach().sum(),
            "clip_fraction": clipped.sum(),
            "approx_kl": approx_kl(log_probs, old.log_probs).sum(),
        }


def value_objective(config: AlgorithmConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """(values, old values, returns) -> loss per token."""
    if config.value_clip_range is None:
        return lambda values, old_values, returns: squared_value_loss(values, returns)
    return partial(clipped_value_loss, clip_range=config.value_clip_range)
