"""Where an iteration's prompts and responses come from: what a source of rollouts is.

    source.begin(iteration, num_iterations)
    drawn = source.draw(position)                       # again where the flow asks for further prompts
    numbers, prompts, rollouts = source.responses([SAMPLED], drawn.numbers, drawn.batch, deferred)
    done = book.finished(...)                           # which reads source.costs() and source.metrics(...)

Sources: `synchronous` (models and engine take turns), `one_step_off` (engines on ranks of their own), `partial` (rows
may go on in the next iteration), `replay` (batches of an earlier run). `trainers.generating` chooses one by the config.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.data.usable import Dropped
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.recording.iteration import Metrics
from hybridflow.reshard.execute import ReshardCost
from hybridflow.rollout.rows import TurnCounts


@dataclass(frozen=True)
class Sampled:
    """Responses drawn as the config's `sampling` says."""


@dataclass(frozen=True)
class Greedy:
    """One response a prompt, the likeliest token always."""


SAMPLED = Sampled()
Kinds = Sequence[Sampled | Greedy]
DeferredRows = Callable[[PromptBatch], Sequence[int]]
Moment = Literal["after", "stopped", "failed"]
Numbers = tuple[int, ...]
NO_IDS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class PromptDraw:
    """Prompts, with their numbers in the data set.

    first, position: how many prompts the run had drawn before, and has drawn with these. dropped: rows passed over.
    """

    batch: PromptBatch
    numbers: tuple[int, ...]
    first: int
    position: int
    dropped: Dropped


class Delivered(NamedTuple):
    """Rollouts, one of each kind, of prompts, with the prompts' numbers in the data set."""

    numbers: Numbers
    prompts: PromptBatch
    rollouts: tuple[RolloutBatch, ...]


@dataclass(frozen=True)
class GenerationCosts:
    """Of an iteration on this rank.

    reshards: none where no weights moved. engine_bytes: of the engine's weights outside the trainer's memory.
    cache_use: metrics of the KV cache, by names alike on all ranks. num_generated: tokens of responses.
    turns: None where no environment answers, or nothing is generated.
    """

    reshards: Sequence[ReshardCost] = ()
    engine_bytes: int = 0
    cache_use: Mapping[str, float] = field(default_factory=dict)
    num_generated: int = 0
    turns: TurnCounts | None = None


class Source(Protocol):
    """Calls are collective over the ranks that train."""

    @property
    def models_in_place(self) -> bool:
        """Whether trained weights, and what is offloaded, are where training has left them."""

    def begin_run(self) -> list[str]:
        """Called once, when the run directory exists. Returns lines for the user on the rollouts of this start."""

    def draw(self, position: int) -> PromptDraw:
        """The prompts behind the first `position` ones of the run."""

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """Prompts by their numbers in the data set."""

    def begin(self, iteration: int, num_iterations: int) -> Tensor:
        """An iteration begins: costs of an evaluation, or of the iteration before, are forgotten.

        Returns (n,) int64 numbers of records of the engine's experts that the source still needs.
        """

    def responses(self, kinds: Kinds, numbers: Numbers, prompts: PromptBatch, deferred: DeferredRows) -> Delivered:
        """One rollout of each kind, with one reshard of the weights. A source may deliver other prompts than these.

        numbers: of the prompts in the data set.
        deferred: gives the rollout rows of these prompts whose old log-probs come from the first step.
        Errors: FlowError or DataError where the source has no such rollouts.
        """

    def evaluate(
        self, iteration: int, sets: Callable[[], Sequence[HeldoutSet]], *, whole: bool
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """Responses to held-out sets after an iteration. whole: of all sets."""

    def costs(self) -> GenerationCosts:
        """Since the iteration began, or since the last call."""

    def metrics(self, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """Metrics of generation, which replace those of the same name in `of_trainers`."""

    def state(self, state: RunState, moment: Moment) -> RunState:
        """Add the source's rollouts for the next start to the state of a checkpoint, in `RunState.kept`.

        moment: after: `state` follows a complete iteration, also one without its step. stopped, failed: `state` comes
        before an iteration that a request or an error ended.
        """

    def close(self, *, saved: bool | None) -> None:
        """End the source with the run. saved: whether a stopped run has a checkpoint; None: the run is complete."""
