"""What the actor and the critic minimise, per token, out of the functions in `algorithms/`.

An objective reads the batch's own per-token fields at the places that a micro-batch computes:

    PolicyObjective(lambda log_probs, entropy, tokens: (-log_probs * tokens.advantages, {}))

is REINFORCE on a batch with a field `advantages`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.importance import truncated_importance_weights
from hybridflow.algorithms.kl import KL_ESTIMATORS, AdaptiveKL
from hybridflow.algorithms.loss_mean import LossMean, sequence_token_mean, token_mean
from hybridflow.algorithms.policy_loss import (
    approx_kl,
    clipped_policy_loss,
    clipped_tokens,
    dual_clipped_policy_loss,
    probability_ratio,
)
from hybridflow.algorithms.value_loss import clipped_value_loss, squared_value_loss
from hybridflow.batch import Tokens
from hybridflow.config import KL, PolicyLoss

MeanOver = Callable[[Tensor, Tensor], LossMean]  # (response mask, lengths) of the whole mini-batch
LOSS_MEANS: Mapping[str, MeanOver] = {"token_mean": token_mean, "sequence_token_mean": sequence_token_mean}
DUAL_CLIP = 3.0  # c of Ye et al. 2020


@dataclass(frozen=True)
class PolicyObjective:
    """What the actor minimises.

    loss: (log_probs, entropy, tokens) -> the loss of each of r response tokens, (r,), and by name what else is worth
    knowing of each, (r,) too: their means over all response tokens are in the metrics as actor/NAME.
    """

    loss: Callable[[Tensor, Tensor, Tokens], tuple[Tensor, Mapping[str, Tensor]]]
    mean: MeanOver = token_mean
    reports: tuple[str, ...] = ()  # the names


@dataclass(frozen=True)
class ValueObjective:
    """What the critic minimises. loss: (values, tokens) -> the loss of each of r response tokens, (r,)."""

    loss: Callable[[Tensor, Tokens], Tensor]
    mean: MeanOver = token_mean


@dataclass(frozen=True)
class KLTerm:
    """The KL to the reference in a run: where it enters, and its coefficient now."""

    config: KL
    coef: float

    def estimate(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return KL_ESTIMATORS[self.config.estimator](log_probs, ref_log_probs)

    def updated(self, kl_mean: float, num_sequences: int) -> "KLTerm":
        """After an iteration. kl_mean: nats a sequence."""
        if self.config.controller == "fixed":
            return self
        controller = AdaptiveKL(self.coef, self.config.target, self.config.horizon)
        return KLTerm(self.config, controller.updated(kl_mean, num_sequences).coef)


def policy_loss(config: PolicyLoss, kl: KLTerm) -> PolicyObjective:
    """policy loss x importance weight - entropy_coef x entropy + kl coef x KL(pi, reference), where kl.use is loss.

    Reads log_probs and advantages; rollout_log_probs with an importance cap, ref_log_probs with a KL in the loss.
    """
    low, high = config.clip_range, config.clip_range_high or config.clip_range

    def loss(log_probs: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, Mapping[str, Tensor]]:
        old, advantages = tokens.log_probs, tokens.advantages
        ratio = probability_ratio(log_probs, old)
        match config.kind:
            case "clip":
                each = clipped_policy_loss(ratio, advantages, clip_low=low, clip_high=high)
            case "dual_clip":
                bound = config.dual_clip or DUAL_CLIP
                each = dual_clipped_policy_loss(ratio, advantages, clip_low=low, clip_high=high, dual_clip=bound)
        if config.importance_cap is not None:
            each = each * truncated_importance_weights(old, tokens.rollout_log_probs, cap=config.importance_cap)
        if config.entropy_coef:
            each = each - config.entropy_coef * entropy
        if kl.config.use == "loss":
            each = each + kl.coef * kl.estimate(log_probs, tokens.ref_log_probs)
        clipped = clipped_tokens(ratio, advantages, clip_low=low, clip_high=high)
        return each, {"clip_fraction": clipped, "approx_kl": approx_kl(log_probs, old)}

    return PolicyObjective(loss, LOSS_MEANS[config.loss_mean], ("clip_fraction", "approx_kl"))


def value_loss(value_clip_range: float | None) -> ValueObjective:
    """Half the squared error, clipped near the old value where there is a range. Reads values and returns."""
    if value_clip_range is None:
        return ValueObjective(lambda values, tokens: squared_value_loss(values, tokens.returns))
    return ValueObjective(
        lambda values, tokens: clipped_value_loss(values, tokens.values, tokens.returns, clip_range=value_clip_range)
    )
