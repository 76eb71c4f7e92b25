"""Synchronous rollouts: models and engine take turns on the same ranks. The actor's weights are the engine's meanwhile.

    iteration k:   draw prompts | weights to the engine | generate | weights back | flow on the rollout

Replicas that are done score rows while others still generate (`overlapped_scoring`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config.length_buckets import always
from hybridflow.config.sampling import SamplingConfig
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.generation import (
    NO_IDS,
    SAMPLED,
    DeferredRows,
    Delivered,
    GenerationCosts,
    Greedy,
    Kinds,
    Moment,
    Numbers,
    PromptDraw,
    Sampled,
)
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles, training_memory_offloaded
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.parallel.platform import Platform
from hybridflow.parallel.seeds import request_seed
from hybridflow.recording.iteration import Metrics
from hybridflow.recording.measure import Stopwatch
from hybridflow.roles.generator import Generator


class SharedEngine:
    """An engine on the ranks of the models, which take turns with it. models_in_place: see `Source`."""

    def __init__(self, generator: Generator, roles: Roles, platform: Platform) -> None:
        self.generator, self._roles, self._platform = generator, roles, platform
        self.models_in_place = True

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """The actor's weights are the engine's within the block, in the engine's layout; bitwise restored after it.

        In strict order: memory that training alone needs is freed, weights are put in place, caches are emptied. The KV
        cache takes memory only when every rank has come so far.
        """
        self.models_in_place, failure = False, None
        try:
            with training_memory_offloaded(self._roles, self._platform), self.generator.resharded():
                self._platform.empty_caches()
                dist.barrier(group=dist.group.WORLD)
                with self.generator.awake():
                    try:
                        yield
                    except Exception as error:
                        failure = error
            self.models_in_place = True
        finally:
            if failure is not None:  # also where an engine that has failed cannot go to sleep
                raise failure

    def heldout_responses(
        self, sets: Sequence[HeldoutSet], show: Callable[[HeldoutSet], None] = lambda heldout: None
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """Responses to each held-out set. Seeds depend on the set's name, on no iteration. show: called before each."""
        found = []
        with self.awake():
            for heldout in sets:
                show(heldout)
                found.append((heldout, heldout_rollout(self.generator, heldout)))
        return found

    def greedy_responses(self, prompts: PromptBatch) -> RolloutBatch:
        """One to each, as an evaluation on the only held-out set has them."""
        [(_, responses)] = self.heldout_responses([HeldoutSet("", prompts)])
        return responses


class Synchronous:
    """See `Source`."""

    def __init__(
        self,
        engine: SharedEngine,
        scoring: OverlappedScoring,
        sampling: SamplingConfig,
        *,
        draws: PromptDraws,
        watch: Stopwatch,
        hooks: RunHooks,
    ) -> None:
        self.engine, self.scoring, self._sampling = engine, scoring, sampling
        self._data, self._watch, self._hooks = draws, watch, hooks
        self._iteration = self._first_prompt = self._num_sampled = self._num_generated = 0

    @property
    def models_in_place(self) -> bool:
        """See `Source`."""
        return self.engine.models_in_place

    def begin_run(self) -> list[str]:
        """See `Source`."""
        return self.engine.generator.notes()

    def draw(self, position: int) -> PromptDraw:
        """See `Source`. Seeds of sampling go by the prompts' places in the run."""
        drawn, self._num_sampled = self._data.draw(position), 0
        self._first_prompt = drawn.first
        return drawn

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """See `Source`."""
        return self._data.at(numbers)

    def begin(self, iteration: int, num_iterations: int) -> Tensor:
        """See `Source`."""
        self._iteration, self._num_generated = iteration, 0
        forget_measures(self.engine.generator)
        return NO_IDS

    def responses(self, kinds: Kinds, numbers: Numbers, prompts: PromptBatch, deferred: DeferredRows) -> Delivered:
        """See `Source`."""
        if list(kinds) == [SAMPLED] and not self._num_sampled:
            rollouts: tuple[RolloutBatch, ...] = (self._sampled_alone(prompts, deferred),)
        else:
            self.scoring.disable()
            with self.engine.awake(), self._watch.phase("generate"):
                rollouts = tuple(self._rollout(kind, prompts) for kind in kinds)
        return Delivered(numbers, prompts, rollouts)

    def evaluate(
        self, iteration: int, sets: Callable[[], Sequence[HeldoutSet]], *, whole: bool
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """See `Source`."""
        return self.engine.heldout_responses(sets())

    def costs(self) -> GenerationCosts:
        """See `Source`."""
        return costs_of(self.engine.generator, self._num_generated)

    def metrics(self, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """See `Source`: every rank that generates trains, too."""
        return {}

    def state(self, state: RunState, moment: Moment) -> RunState:
        """See `Source`: nothing. The rollout of an iteration that was stopped is a file (checkpoint.save_rollout)."""
        return state

    def close(self, *, saved: bool | None) -> None:
        """See `Source`: the engine ends with the process."""

    def _sampled_alone(self, prompts: PromptBatch, deferred: DeferredRows) -> RolloutBatch:
        """What is scored while others generate; of one that an earlier start has kept, in the same units."""
        rollout = self._hooks.load_rollout(prompts, self._iteration)
        self.scoring.begin(prompts, deferred, generates=rollout is None)
        if rollout is None:
            with self.engine.awake(), self._watch.phase("generate"):
                rollout = self._rollout(SAMPLED, prompts, self.scoring)
            self._hooks.save_rollout(self._iteration, rollout.tensors())
        self._num_sampled = 1  # also where an earlier start has sampled them
        self.scoring.assign_rest(rollout)
        return rollout

    def _rollout(
        self, how: Sampled | Greedy, prompts: PromptBatch, listener: OverlappedScoring | None = None
    ) -> RolloutBatch:
        greedy, generator = isinstance(how, Greedy), self.engine.generator
        generation = 0 if greedy else self._num_sampled
        self._num_sampled += not greedy
        rollout = generator.generate(
            prompts,
            temperature=0.0 if greedy else None,
            samples_per_prompt=always(1) if greedy else self._sampling.samples,
            iteration=self._iteration,
            first_prompt=self._first_prompt,
            generation=generation,
            listener=listener,
        )
        self._num_generated += rollout.num_response_tokens
        generator.count_work(rollout, self._watch)
        return rollout


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
    """Since measures were forgotten, or since the last call."""
    cache_use = generator.pop_cache_use()
    return GenerationCosts(generator.costs, generator.own_bytes, cache_use, num_generated, generator.turn_counts)
