"""Critic and reward model: models with a scalar head."""

from collections.abc import Callable

from torch import Tensor

from hybridflow.batch import RolloutBatch, TrainBatch
from hybridflow.config import RewardModelConfig, TrainedRoleConfig
from hybridflow.errors import CheckpointError
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.optimizer import TrainedModel
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.platform import Platform
from hybridflow.roles.base import Role


class Critic(Role):
    """V of the state before each response token."""

    def __init__(self, config: TrainedRoleConfig, *, platform: Platform, exchange: Exchange) -> None:
        super().__init__(
            "critic", config, value_head=True, recompute=config.recompute, platform=platform, exchange=exchange
        )
        self.trained = TrainedModel(self.model, self.grid, config.optimizer)
        self.model = self.trained.ddp

    def values(self, batch: RolloutBatch) -> Tensor:
        """(T,) values at the response tokens."""
        return self._token_results(batch, lambda values, mb: {"out": values})

    def update(
        self, batch: TrainBatch, objective: Callable[[Tensor, Tensor, Tensor], Tensor], *, lr: float
    ) -> dict[str, Tensor]:
        """One optimizer step on a mini-batch; the mean loss over its response tokens, and the gradient norm."""
        self.trained.zero_gradients()
        sums = self.accumulate(batch, objective)
        return {**sums, "grad_norm": self.trained.step(lr)}

    def accumulate(self, batch: TrainBatch, objective: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        """Add the gradient of the mean objective over the mini-batch's response tokens, wherever they are computed."""
        num_tokens = int(batch.response_mask.sum())

        def loss(values: Tensor, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            old_values, returns = (x[mb.where].to(values.device) for x in (batch.values, batch.returns))
            total = objective(values, old_values, returns).sum()
            return total / num_tokens, {"loss": total.detach()}

        return {name: total / num_tokens for name, total in self._accumulate(batch, loss).items()}


class RewardModel(Role):
    """A `*ForSequenceClassification` with one label, read at the last token. Never trained."""

    def __init__(self, name: str, config: RewardModelConfig, *, platform: Platform, exchange: Exchange) -> None:
        super().__init__(name, config, value_head=True, recompute="none", platform=platform, exchange=exchange)
        if self.spec.head != "score":
            raise CheckpointError(
                f"{self.spec.path / 'config.json'}: {name}.model must be a *ForSequenceClassification with a trained "
                f"score.weight, this is a causal language model"
            )
        self.model.requires_grad_(False)
        self.weight = config.weight

    def scores(self, batch: RolloutBatch) -> Tensor:
        """(N,) scores of the sequences."""
        return self._sequence_results(batch, _as_is)


def _as_is(values: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
    return {"out": values}
