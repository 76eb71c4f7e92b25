"""Reference and actor: models that give log-probabilities. The actor is trained, and the engine generates with it."""

from torch import Tensor

from hybridflow.architecture.weights import Weight
from hybridflow.batch import RolloutBatch, TrainBatch
from hybridflow.models.build import named_weights
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.pipeline import Readout
from hybridflow.parallel.exchange import Part
from hybridflow.parallel.vocab import vocab_parallel_log_probs
from hybridflow.planning.placed import PlacedModel
from hybridflow.roles.base import Role, TrainedRole, World
from hybridflow.roles.objectives import OldTokens, PolicyObjective


class Reference(Role):
    """The policy that the actor is held close to. Never trained."""

    def __init__(self, placed: PlacedModel, *, temperature: float, world: World) -> None:
        super().__init__(placed, recompute="none", world=world)
        self.temperature = temperature
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def log_probs(self, batch: RolloutBatch) -> Part:
        """Of (T,): log-probs of the response tokens, at the sampling temperature."""
        return self._token_results(batch, _log_probs(self))


class Actor(TrainedRole):
    """The policy that is trained, and that the engine generates with."""

    report = ("loss", "entropy", "clip_fraction", "approx_kl", "grad_norm")

    def __init__(self, placed: PlacedModel, *, temperature: float, world: World) -> None:
        super().__init__(placed, world=world, bucket_bytes=world.bucket_bytes)
        self.temperature = temperature

    def log_probs(self, batch: RolloutBatch) -> Part:
        """Of (T,): log-probs of the response tokens, at the sampling temperature."""
        return self._token_results(batch, _log_probs(self))

    def update(self, batch: TrainBatch, objective: PolicyObjective, *, kl_coef: float, lr: float) -> Tensor:
        """One optimizer step on a mini-batch; this rank's part of `report`, means over its response tokens."""
        return self._step(lambda: self.accumulate(batch, objective, kl_coef=kl_coef), lr)

    def accumulate(self, batch: TrainBatch, objective: PolicyObjective, *, kl_coef: float) -> Tensor:
        """Add the gradient of the mean objective over the mini-batch's response tokens, wherever they are computed."""
        num_tokens = int(batch.response_mask.sum())

        def loss(logits: Tensor, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = _log_probs_and_entropy(self, logits, mb)
            total, results = objective(log_probs, entropy, _old_tokens(batch, mb, log_probs), kl_coef)
            return total / num_tokens, results

        return self._accumulate(batch, loss, self.report[:-1]) / num_tokens

    def weights(self) -> dict[str, tuple[Weight, Tensor]]:
        """This rank's live weights by megatron name."""
        found = named_weights(self.chunks, self.spec, head="lm")
        return {weight.megatron: (weight, parameter.data) for weight, parameter in found}


def _log_probs(role: Reference | Actor) -> Readout:
    return lambda logits, mb: {"out": _log_probs_and_entropy(role, logits, mb)[0]}


def _log_probs_and_entropy(role: Reference | Actor, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return vocab_parallel_log_probs(
        logits,
        micro_batch.targets,
        group=role.grid.groups.tp,
        vocab_size=role.spec.vocab_size,
        temperature=role.temperature,
    )


def _old_tokens(batch: TrainBatch, micro_batch: MicroBatch, like: Tensor) -> OldTokens:
    fields = (batch.log_probs, batch.rollout_log_probs, batch.ref_log_probs, batch.advantages)
    return OldTokens(*(field[micro_batch.where].to(like.device) for field in fields))
