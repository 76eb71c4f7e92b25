"""How the rows of a rollout go on where an environment answers them: what the engine asks of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hybridflow.batch import PromptBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.rollout.turns import Answers, LeaderBroadcast, TurnCounts, TurnTaking


class EnvironmentRows(Protocol):
    """Who makes the answers to a rollout's rows. counts: of this rank. num_rewards: parts that a row is given.

    several: a row may have several sequences.
    """

    @property
    def counts(self) -> TurnCounts: ...

    @property
    def num_rewards(self) -> int: ...

    @property
    def several(self) -> bool: ...

    def conversations(
        self, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
    ) -> Answers: ...


@dataclass(frozen=True)
class EnvironmentTurns:
    """leads: this rank is the first of an engine replica, and therefore asks for the turns."""

    environments: EnvironmentRows
    agreement: LeaderBroadcast
    leads: bool

    def begin(
        self, prompts: PromptBatch, counts: Tensor, limits: LengthBuckets[int], seed: Sequence[int]
    ) -> TurnTaking:
        """Open the turns of the next rollout."""
        answers = self.environments.conversations(prompts, counts, limits, seed) if self.leads else None
        return TurnTaking(self.agreement, answers, self.environments.counts, self.environments.several)
