"""What the actor and the critic minimise, per token, out of the functions in `algorithms/`.

An objective reads the batch's own per-token fields at the places that a micro-batch computes:

    PolicyObjective(lambda log_probs, entropy, tokens: (-log_probs * tokens.advantages, {}))

is REINFORCE on a batch with a field `advantages`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import to_tokens
from hybridflow.algorithms.importance import (
    geometric_band_weights,
    icepop_weights,
    sequence_importance_weights,
    truncated_importance_weights,
)
from hybridflow.algorithms.kl import KL_ESTIMATORS, AdaptiveKL
from hybridflow.algorithms.loss_mean import (
    LossMean,
    constant,
    prompt_mean,
    sequence_sum_mean,
    sequence_token_mean,
    token_mean,
)
from hybridflow.algorithms.policy_loss import (
    approx_kl,
    cispo_policy_loss,
    clipped_high,
    clipped_low,
    clipped_policy_loss,
    dual_clipped_policy_loss,
    probability_ratio,
    reinforce_policy_loss,
    sapo_policy_loss,
    sequence_ratio,
)
from hybridflow.algorithms.value_loss import clipped_value_loss, squared_value_loss
from hybridflow.batch import RolloutBatch, Tokens
from hybridflow.config.losses import KL, Importance, LossMeanName, PolicyLoss

MeanOver = Callable[[RolloutBatch], LossMean]  # of the whole mini-batch
Reports = Mapping[str, Tensor]
DUAL_CLIP = 3.0  # c of Ye et al. 2020
TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # of Gao et al. 2025


def over_tokens(batch: RolloutBatch) -> LossMean:
    """The mean over all response tokens."""
    return token_mean(batch.response_mask, batch.lengths)


@dataclass(frozen=True)
class PolicyObjective:
    """What the actor minimises.

    loss: (log_probs, entropy, tokens) -> the loss of each of r response tokens, (r,), and by name what else is worth
    knowing of each, (r,) too: their means over all response tokens are in the metrics as actor/NAME.
    """

    loss: Callable[[Tensor, Tensor, Tokens], tuple[Tensor, Mapping[str, Tensor]]]
    mean: MeanOver = over_tokens
    reports: tuple[str, ...] = ()  # the names


@dataclass(frozen=True)
class ValueObjective:
    """What the critic minimises. loss: (values, tokens) -> the loss of each of r response tokens, (r,)."""

    loss: Callable[[Tensor, Tokens], Tensor]
    mean: MeanOver = over_tokens


def negative_log_likelihood() -> PolicyObjective:
    """-log pi of every response token, and the mean over all response tokens: supervised fine-tuning."""
    return PolicyObjective(lambda log_probs, entropy, tokens: (-log_probs, {}))


@dataclass(frozen=True)
class KLTerm:
    """The KL to the reference in a run: where the KL enters, and the coefficient now."""

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


def loss_mean(name: LossMeanName, max_response_length: int | None) -> MeanOver:
    """The mean that the config names. max_response_length: tokens, for `constant` alone.

    Errors: ValueError where `constant` has none.
    """
    match name:
        case "token_mean":
            return over_tokens
        case "sequence_token_mean":
            return lambda batch: sequence_token_mean(batch.response_mask, batch.lengths)
        case "sequence_sum_mean":
            return lambda batch: sequence_sum_mean(batch.response_mask, batch.lengths)
        case "prompt_mean":
            return lambda batch: prompt_mean(batch.response_mask, batch.lengths, batch.prompt_indices)
        case "constant":
            if max_response_length is None:
                raise ValueError("loss_mean: constant needs max_response_length: a flow has it from run.policy_loss")
            limit = max_response_length
            return lambda batch: constant(batch.response_mask, batch.lengths, max_response_length=limit)


def policy_loss(config: PolicyLoss, kl: KLTerm, *, max_response_length: int | None = None) -> PolicyObjective:
    """policy loss x importance weight - entropy_coef x entropy + kl coef x KL(pi, reference), where kl.use is loss.

    Reads log_probs and advantages; rollout_log_probs with importance weights, ref_log_probs with a KL in the loss.
    max_response_length: for loss_mean constant.
    """
    reports = _ratio_reports(config)
    if config.importance is not None:
        reports = (*reports, "weights_out_of_bounds")

    def loss(log_probs: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, Reports]:
        each, known = _policy_term(config, log_probs, tokens)
        if config.importance is not None:
            weights, out = importance_weights(config.importance, tokens)
            each, known = each * weights, {**known, "weights_out_of_bounds": out}
        if config.entropy_coef:
            each = each - config.entropy_coef * entropy
        if kl.config.use == "loss":
            each = each + kl.coef * kl.estimate(log_probs, tokens.ref_log_probs)
        return each, known

    mean = loss_mean(config.loss_mean, max_response_length)
    return PolicyObjective(loss, _over_ended(mean) if config.mask_truncated else mean, reports)


def with_positive_nll(objective: PolicyObjective, batch: RolloutBatch, right: Tensor, coef: float) -> PolicyObjective:
    """The objective + coef x the mean of -log pi over the response tokens of the right responses of a mini-batch.

    Yue et al. 2025 (VAPO), arXiv 2504.05118. The mean is the global mini-batch's, whatever a replica holds of it.

    Args:
        objective: one whose mean is over tokens.
        batch: the mini-batch that it is for.
        right: bool (N,).
        coef: mu of the paper.
    """
    weights, divisor = objective.mean(batch)
    marked = to_tokens(right, batch.response_mask, lengths=batch.lengths) & (weights > 0)
    scale = coef * divisor / max(int(marked.sum()), 1)  # the mean over all tokens divides by theirs

    def loss(log_probs: Tensor, entropy: Tensor, tokens: Tokens) -> tuple[Tensor, Reports]:
        each, known = objective.loss(log_probs, entropy, tokens)
        return each - scale * tokens.at_places(marked) * log_probs, known

    return replace(objective, loss=loss)


def _over_ended(mean: MeanOver) -> MeanOver:
    """The same mean of those responses that have come to an end."""

    def over(batch: RolloutBatch) -> LossMean:
        ended = to_tokens(~batch.truncated, batch.response_mask, lengths=batch.lengths)
        return mean(replace(batch, response_mask=ended))

    return over


def importance_weights(config: Importance, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """What each token's loss is multiplied with, (r,), and whether the weight was out of bounds, (r,) bool."""
    trainer, engine, (low, high) = tokens.log_probs, tokens.rollout_log_probs, config.bounds
    match config.kind:
        case "token":
            return truncated_importance_weights(trainer, engine, cap=high), (trainer - engine).exp() > high
        case "sequence":
            weights = sequence_importance_weights(trainer, engine, tokens.sequences, cap=high)
            return weights, weights >= high
        case "geometric":
            kept = geometric_band_weights(trainer, engine, tokens.sequences, low=low, high=high)
            return kept, kept == 0
        case "icepop":
            weights = icepop_weights(trainer, engine, low=low, high=high)
            return weights, weights == 0


def _policy_term(config: PolicyLoss, log_probs: Tensor, tokens: Tokens) -> tuple[Tensor, Reports]:
    """The loss of the config's kind, and reports of the ratios."""
    old, advantages = tokens.log_probs, tokens.advantages
    low, high = config.clip_range, config.clip_range_high or config.clip_range
    known: dict[str, Tensor] = {"approx_kl": approx_kl(log_probs, old)}
    match config.kind:
        case "reinforce":
            return reinforce_policy_loss(log_probs, advantages), known
        case "sapo":
            tau_positive, tau_negative = config.tau_positive or TAU_POSITIVE, config.tau_negative or TAU_NEGATIVE
            ratio = probability_ratio(log_probs, old)
            each = sapo_policy_loss(ratio, advantages, tau_positive=tau_positive, tau_negative=tau_negative)
            return each, known
        case "cispo":
            ratio = probability_ratio(log_probs, old)
            each = cispo_policy_loss(ratio, log_probs, advantages, clip_low=low, clip_high=high)
            return each, known | _clip_reports(ratio < 1 - low, ratio > 1 + high)
        case "clip":
            ratio = probability_ratio(log_probs, old)
            each = clipped_policy_loss(ratio, advantages, clip_low=low, clip_high=high)
        case "gspo":
            ratio = sequence_ratio(log_probs, old, tokens.sequences)
            each = clipped_policy_loss(ratio, advantages, clip_low=low, clip_high=high)
        case "dual_clip":
            ratio, bound = probability_ratio(log_probs, old), config.dual_clip or DUAL_CLIP
            each = dual_clipped_policy_loss(ratio, advantages, clip_low=low, clip_high=high, dual_clip=bound)
    too_low = clipped_low(ratio, advantages, clip_low=low)
    return each, known | _clip_reports(too_low, clipped_high(ratio, advantages, clip_high=high))


def _clip_reports(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction": torch.logical_or(low, high), "clip_fraction_low": low, "clip_fraction_high": high}


def _ratio_reports(config: PolicyLoss) -> tuple[str, ...]:
    """The names of what `_policy_term` knows: of a kind that does not clip, no clip fractions."""
    if config.kind in ("reinforce", "sapo"):
        return ("approx_kl",)
    return ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "approx_kl")


def value_loss(value_clip_range: float | None) -> ValueObjective:
    """Half the squared error, clipped near the old value where there is a range. Reads values and returns."""
    if value_clip_range is None:
        return ValueObjective(lambda values, tokens: squared_value_loss(values, tokens.returns))
    return ValueObjective(
        lambda values, tokens: clipped_value_loss(values, tokens.values, tokens.returns, clip_range=value_clip_range)
    )
