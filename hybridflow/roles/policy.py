"""Reference and actor: models that give log-probabilities. The actor is trained, and the engine generates with it."""

from collections.abc import Callable

from torch import Tensor

from hybridflow.batch import RolloutBatch, TrainBatch
from hybridflow.config import RoleConfig, TrainedRoleConfig
from hybridflow.models.build import named_weights
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.optimizer import TrainedModel
from hybridflow.models.weights import EMBEDDING, LM_HEAD, Weight
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.platform import Platform
from hybridflow.parallel.vocab import vocab_parallel_log_probs
from hybridflow.roles.base import Role
from hybridflow.roles.objectives import OldTokens, PolicyObjective


class Policy(Role):
    """A causal language model whose log-probs are those at the sampling temperature."""

    def __init__(
        self,
        name: str,
        config: RoleConfig,
        *,
        temperature: float,
        recompute: str,
        platform: Platform,
        exchange: Exchange,
    ) -> None:
        super().__init__(name, config, value_head=False, recompute=recompute, platform=platform, exchange=exchange)
        self._temperature = temperature

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """(T,) log-probs of the response tokens."""
        return self._token_results(batch, lambda logits, mb: {"out": self._log_probs_and_entropy(logits, mb)[0]})

    def _log_probs_and_entropy(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return vocab_parallel_log_probs(
            logits,
            micro_batch.targets,
            group=self.grid.groups.tp,
            vocab_size=self.spec.vocab_size,
            temperature=self._temperature,
        )


class Reference(Policy):
    """The policy that the actor is held close to. Never trained."""

    def __init__(self, config: RoleConfig, *, temperature: float, platform: Platform, exchange: Exchange) -> None:
        super().__init__(
            "reference",
            config,
            temperature=temperature,
            recompute="none",
            platform=platform,
            exchange=exchange,
        )
        self.model.requires_grad_(False)


class Actor(Policy):
    """The policy that is trained."""

    def __init__(
        self, config: TrainedRoleConfig, *, temperature: float, platform: Platform, exchange: Exchange
    ) -> None:
        super().__init__(
            "actor",
            config,
            temperature=temperature,
            recompute=config.recompute,
            platform=platform,
            exchange=exchange,
        )
        self.trained = TrainedModel(self.model, self.grid, config.optimizer)
        self.model = self.trained.ddp

    def update(self, batch: TrainBatch, objective: PolicyObjective, *, kl_coef: float, lr: float) -> dict[str, Tensor]:
        """One optimizer step on a mini-batch; means over its response tokens, and the gradient norm."""
        self.trained.zero_gradients()
        sums = self.accumulate(batch, objective, kl_coef=kl_coef)
        return {**sums, "grad_norm": self.trained.step(lr)}

    def accumulate(self, batch: TrainBatch, objective: PolicyObjective, *, kl_coef: float) -> dict[str, Tensor]:
        """Add the gradient of the mean objective over the mini-batch's response tokens, wherever they are computed."""
        num_tokens = int(batch.response_mask.sum())

        def loss(logits: Tensor, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = self._log_probs_and_entropy(logits, mb)
            total, results = objective(log_probs, entropy, _old_tokens(batch, mb, log_probs), kl_coef)
            return total / num_tokens, results

        return {name: total / num_tokens for name, total in self._accumulate(batch, loss).items()}

    def weights(self) -> dict[str, tuple[Weight, Tensor]]:
        """This rank's live weights by megatron name."""
        found = named_weights(self.model, self.spec, value_head=False)
        return {weight.megatron: (weight, parameter.data) for weight, parameter in found}

    def engine_source(self) -> Callable[[str], Tensor]:
        """The memory of each engine parameter by the engine's name. A tied head is the embedding."""
        memory = {weight.engine: tensor for weight, tensor in self.weights().values()}
        if self.spec.tied:
            memory[LM_HEAD.engine] = memory[EMBEDDING.engine]
        return memory.__getitem__


def _old_tokens(batch: TrainBatch, micro_batch: MicroBatch, like: Tensor) -> OldTokens:
    fields = (batch.log_probs, batch.rollout_log_probs, batch.ref_log_probs, batch.advantages)
    return OldTokens(*(field[micro_batch.where].to(like.device) for field in fields))
