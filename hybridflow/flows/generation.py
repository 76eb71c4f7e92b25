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
from hybridflow.config.length_buckets import always
from hybridflow.flows.draws import PromptDraw
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.overlapped_scoring import DeferredRows, OverlappedScoring
from hybridflow.parallel.seeds import request_seed
from hybridflow.recording.iteration import Metrics
from hybridflow.reshard.execute import ReshardCost
from hybridflow.roles.generator import Generator
from hybridflow.rollout.turns import TurnCounts


@dataclass(frozen=True)
class Sampled:
    """Responses drawn as the config's `sampling` says."""


@dataclass(frozen=True)
class Greedy:
    """One response a prompt, the likeliest token always."""


SAMPLED = Sampled()
Kinds = Sequence[Sampled | Greedy]
Moment = Literal["after", "stopped", "failed"]
Numbers = tuple[int, ...]
NO_IDS = torch.zeros(0, dtype=torch.int64)


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
    """

    reshards: Sequence[ReshardCost] = ()
    engine_bytes: int = 0
    cache_use: Mapping[str, float] = field(default_factory=dict)
    num_generated: int = 0


class Source(Protocol):
    """Calls are collective over the ranks that train."""

    scoring: OverlappedScoring

    @property
    def models_in_place(self) -> bool:
        """Whether trained weights, and what is offloaded, are where training has left them."""

    def begin_run(self) -> list[str]:
        """The run directory is there from now on. What the user should know of the rollouts of this start."""

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
        deferred: rows of a sampled rollout of such prompts for which the actor is not asked for log-probs.
        Errors: FlowError or DataError where the source has no such rollouts.
        """

    def evaluate(
        self, iteration: int, sets: Callable[[], Sequence[HeldoutSet]], *, whole: bool
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """Responses to held-out sets after an iteration. whole: of all sets."""

    @property
    def turn_counts(self) -> TurnCounts | None:
        """Of this rank since the iteration began; None where no environment answers, or nothing is generated."""

    def costs(self) -> GenerationCosts:
        """Since the iteration began, or since the last call."""

    def metrics(self, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """What takes the place of metrics that the ranks that train cannot know alone."""

    def state(self, state: RunState, moment: Moment) -> RunState:
        """The state of a checkpoint, with what the source keeps beside it in `RunState.kept`.

        after: of the last whole iteration, also of one that lost its step. stopped, failed: before an iteration that
        ends early, by a request or by an error.
        """

    def close(self, *, saved: bool | None) -> None:
        """The run ends. saved: of a run that was stopped; None: all is done."""


def heldout_rollout(generator: Generator, heldout: HeldoutSet) -> RolloutBatch:
    """Responses to a held-out set. Collective over the world; the engine is awake, with the actor's weights."""
    return generator.generate(
        heldout.prompts,
        temperature=heldout.temperature,
        samples_per_prompt=always(heldout.samples),
        iteration=request_seed("heldout", heldout.name) if heldout.name else 0,
        first_prompt=0,
    )


def forget_measures(generator: Generator) -> None:
    """Costs and counts of turns begin anew."""
    generator.costs.clear()
    generator.pop_cache_use()
    if generator.turn_counts is not None:
        generator.turn_counts.clear()


def costs_of(generator: Generator, num_generated: int) -> GenerationCosts:
    return GenerationCosts(generator.costs, generator.own_bytes, generator.pop_cache_use(), num_generated)
