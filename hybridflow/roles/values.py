"""Critic and reward model: models with a scalar head."""

from collections.abc import Callable

from torch import Tensor

from hybridflow.batch import RolloutBatch, TrainBatch
from hybridflow.config import RewardModelConfig
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.parallel.exchange import Part
from hybridflow.planning.placed import PlacedModel
from hybridflow.roles.base import Role, TrainedRole, World

ValueObjective = Callable[[Tensor, Tensor, Tensor], Tensor]  # (values, old values, returns) -> loss per token


class Critic(TrainedRole):
    """V of the state before each response token."""

    report = ("loss", "grad_norm")

    def __init__(self, placed: PlacedModel, *, world: World) -> None:
        super().__init__(placed, world=world, bucket_bytes=None)

    def values(self, batch: RolloutBatch) -> Part:
        """Of (T,): values at the response tokens."""
        return self._token_results(batch, _as_is)

    def update(self, batch: TrainBatch, objective: ValueObjective, *, lr: float) -> Tensor:
        """One optimizer step on a mini-batch; this rank's part of `report`, means over its response tokens."""
        return self._step(lambda: self.accumulate(batch, objective), lr)

    def accumulate(self, batch: TrainBatch, objective: ValueObjective) -> Tensor:
        """Add the gradient of the mean objective over the mini-batch's response tokens, wherever they are computed."""
        num_tokens = int(batch.response_mask.sum())

        def loss(values: Tensor, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            old_values, returns = (x[mb.where].to(values.device) for x in (batch.values, batch.returns))
            total = objective(values, old_values, returns).sum()
            return total / num_tokens, {"loss": total.detach()}

        return self._accumulate(batch, loss, self.report[:-1]) / num_tokens


class RewardModel(Role):
    """A `*ForSequenceClassification` with one label, read at the last token. Never trained."""

    def __init__(self, placed: PlacedModel, *, world: World) -> None:
        assert isinstance(placed.config, RewardModelConfig), f"{placed.name} is no reward model"
        super().__init__(placed, recompute="none", world=world)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self.weight = placed.config.weight

    def scores(self, batch: RolloutBatch) -> Part:
        """Of (N,): scores of the sequences."""
        return self._sequence_results(batch, _as_is)


def _as_is(values: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
    return {"out": values}
