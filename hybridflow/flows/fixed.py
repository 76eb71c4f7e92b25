"""An iteration on fixed data: one batch of rows, judged by the algorithm's loss, and one step along the gradient.

    sft           Supervised fine-tuning: the mean of -log pi over all tokens of the batch that count.
    reward_model  A Bradley-Terry model of pairs. Ouyang et al. 2022, arXiv 2203.02155.
    dpo           Rafailov et al. 2023, arXiv 2305.18290; with loss: ipo Azar et al. 2023, arXiv 2310.12036.
    kto           Ethayarajh et al. 2024, arXiv 2402.01306.

A training step and an evaluation read the same losses. A loss that couples sequences is computed on the whole batch,
which every rank holds; its derivatives with respect to a model's outputs give the model's step. So no two sequences
have to share a micro-batch, a replica or a rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import sequence_sums
from hybridflow.algorithms.preferences import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
)
from hybridflow.batch import PerSequence, PerToken, RolloutBatch
from hybridflow.config.fixed_algorithms import DPO, KTO, SFT, FixedAlgorithm, RewardModeling
from hybridflow.data.example_batches import (
    LabelledBatch,
    PairBatch,
    given_batch,
    labelled_batch,
    mismatched,
    pair_batch,
)
from hybridflow.data.examples import Example
from hybridflow.flows.run import Run
from hybridflow.recording.iteration import Metrics
from hybridflow.roles.objectives import negative_log_likelihood

Batch = TypeVar("Batch", bound=RolloutBatch, covariant=True)


@dataclass(frozen=True)
class SFTBatch(RolloutBatch):
    log_probs: PerToken


@dataclass(frozen=True)
class ScoredPairBatch(PairBatch):
    raw_scores: PerSequence


@dataclass(frozen=True)
class DPOBatch(PairBatch):
    log_probs: PerToken
    ref_log_probs: PerToken


@dataclass(frozen=True)
class KTOBatch(LabelledBatch):
    log_probs: PerToken
    ref_log_probs: PerToken


@dataclass(frozen=True)
class LossResult(Generic[Batch]):
    """each: the losses of the batch's pairs, rows or tokens under "loss", and other values by name, perhaps of some
    rows alone. outputs: the model's outputs for the batch, (T,) or (N,), which the losses are a function of."""

    batch: Batch
    each: Mapping[str, Tensor]
    outputs: Tensor

    def gradients(self) -> Tensor:
        """Of the mean loss, with respect to the model's outputs."""
        [found] = torch.autograd.grad(self.each["loss"].mean(), [self.outputs])
        return found


def means(each: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
    """The mean of each tensor that has elements, by name."""
    return {name: values.detach().mean() for name, values in each.items() if len(values)}


# ------------------------------------------------------------------------------------------------ one completion


def sft_loss_result(run: Run, examples: Sequence[Example]) -> LossResult[SFTBatch]:
    """-log pi of each token that counts."""
    rows = given_batch(examples)
    known = run.whole(rows, log_probs=run.actor.log_probs(rows))
    batch = SFTBatch(**vars(rows), log_probs=known.log_probs)
    return LossResult(batch, {"loss": -known.log_probs[rows.response_mask]}, known.log_probs)


def kto_loss_result(run: Run, c: KTO, examples: Sequence[Example]) -> LossResult[KTOBatch]:
    """Good completions against bad ones. The mismatched pairs are of the whole batch, wherever their rows are run."""
    count = len(examples)
    rows = given_batch([*examples, *mismatched(examples, run.max_length)])
    known = run.whole(rows, log_probs=run.actor.log_probs(rows), ref_log_probs=run.reference.log_probs(rows))
    point = kto_reference_point(log_ratios(known.log_probs, known.ref_log_probs, rows)[count:])
    own = labelled_batch(examples)
    num_tokens = len(own.input_ids)
    batch = KTOBatch(
        **vars(own), log_probs=known.log_probs[:num_tokens], ref_log_probs=known.ref_log_probs[:num_tokens]
    )
    outputs = batch.log_probs.clone().requires_grad_()
    ratios = log_ratios(outputs, batch.ref_log_probs, batch)
    loss = kto_loss(
        ratios,
        batch.desirable,
        point,
        beta=c.beta,
        desirable_weight=c.desirable_weight,
        undesirable_weight=c.undesirable_weight,
    )
    rewards = c.beta * ratios.detach()
    each = {
        "loss": loss,
        "desirable_reward_mean": rewards[batch.desirable],
        "undesirable_reward_mean": rewards[~batch.desirable],
        "reference_point": point[None],
    }
    return LossResult(batch, each, outputs)


# ------------------------------------------------------------------------------------------------ pairs


def reward_model_loss_result(run: Run, examples: Sequence[Example]) -> LossResult[ScoredPairBatch]:
    """The score of the better completion against that of the other."""
    pairs = pair_batch(examples)
    known = run.whole(pairs, raw_scores=run.reward_model.scores(pairs))
    outputs = known.raw_scores.clone().requires_grad_()
    loss = bradley_terry_loss(outputs[0::2], outputs[1::2], pairs.margins[0::2])
    batch = ScoredPairBatch(**vars(pairs), raw_scores=known.raw_scores)
    return LossResult(batch, {"loss": loss, **pair_metrics(known.raw_scores)}, outputs)


def dpo_loss_result(run: Run, c: DPO, examples: Sequence[Example]) -> LossResult[DPOBatch]:
    """How much more than the reference the policy prefers the better completion."""
    pairs = pair_batch(examples)
    known = run.whole(pairs, log_probs=run.actor.log_probs(pairs), ref_log_probs=run.reference.log_probs(pairs))
    outputs = known.log_probs.clone().requires_grad_()
    ratios = log_ratios(outputs, known.ref_log_probs, pairs)
    if c.loss == "ipo":
        loss = ipo_loss(ratios[0::2], ratios[1::2], beta=c.beta)
    else:
        loss = dpo_loss(ratios[0::2], ratios[1::2], beta=c.beta, label_smoothing=c.label_smoothing)
    batch = DPOBatch(**vars(pairs), log_probs=known.log_probs, ref_log_probs=known.ref_log_probs)
    return LossResult(batch, {"loss": loss, **pair_metrics(c.beta * ratios.detach())}, outputs)


def log_ratios(log_probs: Tensor, ref_log_probs: Tensor, batch: RolloutBatch) -> Tensor:
    """Of each sequence, (N,): log pi - log pi_ref of the tokens that count."""
    return sequence_sums(log_probs - ref_log_probs, batch.response_mask, lengths=batch.lengths)


def pair_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """Of each pair: whether the chosen completion has the higher reward, by how much, and both rewards."""
    chosen, rejected = rewards[0::2], rewards[1::2]
    return {
        "reward_accuracy": (chosen > rejected).float(),
        "reward_margin_mean": chosen - rejected,
        "chosen_reward_mean": chosen,
        "rejected_reward_mean": rejected,
    }


# ------------------------------------------------------------------------------------------------ iterations


def sft(run: Run) -> RolloutBatch:
    """One pass and one step: this loss couples nothing."""
    batch = given_batch(run.examples)
    run.about_to_step(batch)
    run.actor.update(batch, negative_log_likelihood())
    return batch


def reward_model(run: Run) -> RolloutBatch:
    judged = reward_model_loss_result(run, run.examples)
    run.about_to_step(judged.batch, means(judged.each))
    run.reward_model.step(judged.batch, judged.gradients())
    return judged.batch


def dpo(run: Run, c: DPO) -> RolloutBatch:
    judged = dpo_loss_result(run, c, run.examples)
    run.about_to_step(judged.batch, means(judged.each))
    run.actor.step(judged.batch, judged.gradients())
    return judged.batch


def kto(run: Run, c: KTO) -> RolloutBatch:
    judged = kto_loss_result(run, c, run.examples)
    run.about_to_step(judged.batch, means(judged.each))
    run.actor.step(judged.batch, judged.gradients())
    return judged.batch


# -------------------------------------------------------------------------------------------- by the config's algorithm


def fixed_flow(run: Run, algorithm: FixedAlgorithm) -> RolloutBatch:
    """An iteration of the algorithm."""
    match algorithm:
        case SFT():
            return sft(run)
        case RewardModeling():
            return reward_model(run)
        case DPO():
            return dpo(run, algorithm)
        case KTO():
            return kto(run, algorithm)


def loss_result(run: Run, algorithm: FixedAlgorithm, examples: Sequence[Example]) -> LossResult[RolloutBatch]:
    """Rows by the algorithm's loss, without a step."""
    match algorithm:
        case SFT():
            return sft_loss_result(run, examples)
        case RewardModeling():
            return reward_model_loss_result(run, examples)
        case DPO():
            return dpo_loss_result(run, algorithm, examples)
        case KTO():
            return kto_loss_result(run, algorithm, examples)


def evaluate_fixed(
    run: Run, algorithm: FixedAlgorithm, examples: Sequence[Example], batch_size: int
) -> dict[str, float]:
    """The means of `loss_result` over all held-out rows, in batches of `batch_size` to twice as many rows."""
    parts = torch.arange(len(examples)).tensor_split(max(len(examples) // batch_size, 1))
    found = [loss_result(run, algorithm, [examples[i] for i in part.tolist()]).each for part in parts]
    each: Metrics = means({name: torch.cat([part[name].detach() for part in found]) for name in found[0]})
    return {f"eval/{name}": float(value) for name, value in each.items()}
