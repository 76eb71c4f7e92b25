"""Critic and reward models, those that are trained and those that are read: models with a scalar head."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.algorithms.loss_mean import LossMean
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weight_files import check_score_head
from hybridflow.batch import RolloutBatch, Tokens, to_device_async
from hybridflow.config import RewardModelConfig
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.named_weights import named_weights
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.placement.placed import PlacedModel
from hybridflow.roles.base import PerOutputLoss, Role, RunContext, StepReport, TrainedRole
from hybridflow.roles.objectives import ValueObjective


class Critic(TrainedRole):
    """V of the state before each response token."""

    def __init__(self, placed: PlacedModel, *, world: RunContext, base: TrainedRole | None = None) -> None:
        """base: a model on the same grid, read from the same directory, whose frozen weights are this one's too."""
        super().__init__(placed, world=world, bucket_bytes=None)
        if base is not None:
            self._share(base.weights())

    def _share(self, weights: Mapping[str, tuple[Weight, Tensor]]) -> None:
        """Have one copy of the frozen weights that both models have."""
        for weight, parameter in named_weights(self.chunks, self.spec, head=self.head):
            if not parameter.requires_grad and weight.megatron in weights:
                parameter.data = weights[weight.megatron][1]

    def values(self, batch: RolloutBatch) -> PartialTensor:
        """Of (T,): values at the response tokens."""
        with self._watch.phase("values"):
            return self._token_results(batch, _as_is)

    def update(self, batch: RolloutBatch, objective: ValueObjective) -> StepReport:
        """One optimizer step on a mini-batch."""
        with self._watch.phase("critic_update"):
            return self._step(batch, _per_token(batch, objective), objective.mean, ())

    def accumulate(self, batch: RolloutBatch, objective: ValueObjective) -> Tensor:
        """Add the gradient of `update` to the buffers and take no step."""
        return self._accumulate(batch, _per_token(batch, objective), objective.mean, ())


def _per_token(batch: RolloutBatch, objective: ValueObjective) -> PerOutputLoss:
    def per_token(values: Tensor, mb: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return objective.loss(values, Tokens(batch, mb.where, values.device)), {}

    return per_token


class RewardModel(Role):
    """A `*ForSequenceClassification` with one label, read at the last token that is no pad token. Never trained."""

    def __init__(self, placed: PlacedModel, *, world: RunContext) -> None:
        assert isinstance(placed.config, RewardModelConfig), f"{placed.name} is no reward model"
        check_score_head(placed.name, placed.spec)
        super().__init__(placed, recompute="none", world=world)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self.weight = placed.config.weight

    def scores(self, batch: RolloutBatch) -> PartialTensor:
        """Of (N,): scores of the sequences."""
        return self._sequence_results(batch, _as_is)


class TrainedRewardModel(TrainedRole):
    """A model with a score that is trained; read as `RewardModel`. A head that the directory lacks is drawn anew."""

    def __init__(self, placed: PlacedModel, *, world: RunContext, head_seed: int) -> None:
        super().__init__(placed, world=world, bucket_bytes=None, head_seed=head_seed)

    def scores(self, batch: RolloutBatch) -> PartialTensor:
        """Of (N,): scores of the sequences."""
        with self._watch.phase("scores"):
            return self._sequence_results(batch, _as_is)

    def step(self, batch: RolloutBatch, gradients: Tensor) -> StepReport:
        """One optimizer step along given derivatives of any loss with respect to the scores, (N,).

        The vector-Jacobian product: sequences that a loss couples need not share a micro-batch, a replica or a rank.
        """
        with self._watch.phase("reward_model_update"):
            return self._step(batch, _linear(gradients), _sum_of_sequences, (), make=self._of_sequences)


def _linear(gradients: Tensor) -> PerOutputLoss:
    """sum_i g_i s_i."""

    def per_sequence(scores: Tensor, mb: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return scores * to_device_async(gradients[mb.where], scores.device), {}

    return per_sequence


def _sum_of_sequences(batch: RolloutBatch) -> LossMean:
    return LossMean(torch.ones(len(batch)), 1)


def _as_is(values: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
    return {"out": values}
