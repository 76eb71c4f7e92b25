"""The models of a run, and where their training memory is while the engine works."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.checkpoint.sharded import SavedRole
from hybridflow.config.losses import KL
from hybridflow.parallel.exchange import PartialTensor
from hybridflow.parallel.platform import Platform
from hybridflow.rewards.scorer import Scorer
from hybridflow.roles.base import Role, TrainedRole
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, TrainedRewardModel


@dataclass(frozen=True)
class Roles:
    """The models of a run; None where the algorithm has none."""

    actor: Actor | None = None
    critic: Critic | None = None
    reference: Reference | None = None
    scorer: Scorer | None = None
    reward_model: TrainedRewardModel | None = None

    def trained(self) -> tuple[TrainedRole, ...]:
        """In the order in which an iteration updates them."""
        return tuple(role for role in (self.critic, self.actor, self.reward_model) if role is not None)

    def scoring(self) -> dict[str, tuple[Role, Callable[[RolloutBatch], PartialTensor]]]:
        """By config key: each model, and how it is asked what it makes of a rollout."""
        known: dict[str, tuple[Role, Callable[[RolloutBatch], PartialTensor]]] = {}
        if self.actor is not None:
            known["actor"] = (self.actor, self.actor.log_probs)
        if self.critic is not None:
            known["critic"] = (self.critic, self.critic.values)
        if self.reference is not None:
            known["reference"] = (self.reference, self.reference.log_probs)
        for i, model in enumerate(self.scorer.models if self.scorer is not None else ()):
            known[f"reward.models.{i}"] = (model, model.scores)
        return known

    def portable(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """On rank 0, the tensors with the engine's experts for record ids. Collective over the ranks that train."""
        return tensors if self.actor is None or self.actor.records is None else self.actor.records.portable(tensors)

    def roles_to_save(self, kl: KL) -> tuple[SavedRole, ...]:
        """What a checkpoint holds: all that changes; a reference only where it is reset."""
        return (*self.trained(), self.reference) if kl.resets and self.reference is not None else self.trained()


@contextlib.contextmanager
def training_memory_offloaded(roles: Roles, platform: Platform) -> Iterator[None]:
    """Within the block gradients and optimizer state are where the config wants them while the engine works."""
    with contextlib.ExitStack() as stack:
        for role in reversed(roles.trained()):
            stack.enter_context(role.offloaded())
        platform.empty_caches()
        yield
