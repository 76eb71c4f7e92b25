"""Responses to the prompts of an iteration: from the engine, from an earlier start of the run, or from a replay.

The actor's weights are the engine's while it generates. Replicas that are done score rows while others still generate.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config.length_buckets import always
from hybridflow.config.sampling import SamplingConfig
from hybridflow.flows.draws import Draws
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles, training_memory_offloaded
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.flows.replay import Replay
from hybridflow.parallel.platform import Platform
from hybridflow.parallel.seeds import request_seed
from hybridflow.recording.iteration import Metrics
from hybridflow.recording.measure import Stopwatch
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
DeferredRows = Callable[[PromptBatch], Sequence[int]]
NO_IDS = torch.zeros(0, dtype=torch.int64)


def heldout_rollout(generator: Generator | Replay, heldout: HeldoutSet) -> RolloutBatch:
    """Responses to a held-out set. Collective over the world; the engine is awake, with the actor's weights."""
    return generator.generate(
        heldout.prompts,
        temperature=heldout.temperature,
        samples_per_prompt=always(heldout.samples),
        iteration=request_seed("heldout", heldout.name) if heldout.name else 0,
        first_prompt=0,
    )


class Generation:
    """The generator of a run, and what is scored while it works. Every call is collective over the world."""

    def __init__(
        self,
        generator: Generator | Replay,
        scoring: OverlappedScoring,
        roles: Roles,
        sampling: SamplingConfig,
        *,
        platform: Platform,
        watch: Stopwatch,
        hooks: RunHooks,
    ) -> None:
        self.generator, self.scoring = generator, scoring
        self._roles, self._sampling, self._platform, self._watch, self._hooks = roles, sampling, platform, watch, hooks
        self._first_prompt = self._num_sampled = self.num_generated = 0

    @property
    def costs(self) -> list[ReshardCost]:
        """Of the reshards of the iteration."""
        return self.generator.costs

    @property
    def turn_counts(self) -> TurnCounts | None:
        """Of this rank since the iteration began; None where no environment answers, or nothing is generated."""
        return self.generator.turn_counts

    @property
    def own_bytes(self) -> int:
        """Of the engine's weights outside the trainer's memory, while it has them."""
        return self.generator.own_bytes

    def pop_cache_use(self) -> dict[str, float]:
        """Metrics of the KV cache since the last call; none where nothing is generated."""
        return self.generator.pop_cache_use()

    models_in_place = True  # trained weights, and what is offloaded: not while the engine has the memory
    num_generated: int  # tokens of responses to the prompts of the iteration
    taken: tuple[tuple[int, ...], PromptBatch] | None = None  # whose responses came, where not those that were drawn
    draws: Draws | None = None  # where prompts come from, where not in order from the data

    def notes(self) -> list[str]:
        """What the user should know of the generation of this start."""
        return []

    def begin_run(self) -> None:
        """The run directory is there from now on."""

    def end(self, *, saved: bool | None) -> None:
        """The run ends. saved: of a run that was stopped; None: all is done."""

    def kept(self, before: RunState, *, failed: bool = False) -> RunState:
        """The state before an iteration that ends early, with what a save keeps of it. failed: by an error."""
        return before

    def begin(self, iteration: int, num_iterations: int) -> None:
        """An iteration begins: costs and counts of an evaluation, or of the iteration before, are forgotten."""
        self.num_generated = 0
        self.costs.clear()
        self.pop_cache_use()
        if self.generator.turn_counts is not None:
            self.generator.turn_counts.clear()

    def begin_evaluation(self, iteration: int, *, whole: bool) -> None:
        """Held-out prompts come next, after this iteration. whole: all sets."""

    def kept_records(self) -> Tensor:
        """(n,) numbers of records of the engine's experts that the next iteration needs."""
        return NO_IDS

    def metrics(self, batch: RolloutBatch, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """What takes the place of metrics that the ranks that train cannot know alone."""
        return {}

    def set_seed_position(self, first_prompt: int) -> None:
        """Number the next prompts for the seeds of sampling. first_prompt: how many prompts the run drew before."""
        self._first_prompt, self._num_sampled = first_prompt, 0

    def responses(
        self, kinds: Sequence[Sampled | Greedy], prompts: PromptBatch, iteration: int, deferred: DeferredRows
    ) -> tuple[RolloutBatch, ...]:
        """Generate one rollout for each kind, all with one reshard of the weights.

        deferred: rows of a sampled rollout of such prompts for which the actor is not asked for log-probs.
        """
        if list(kinds) == [SAMPLED] and not self._num_sampled:
            return (self._sampled_alone(prompts, iteration, deferred),)
        self.scoring.disable()
        with self.engine_awake(), self._watch.phase("generate"):
            return tuple(self._rollout(kind, prompts, iteration) for kind in kinds)

    def heldout_responses(
        self, sets: Sequence[HeldoutSet], show: Callable[[HeldoutSet], None] = lambda heldout: None
    ) -> list[RolloutBatch]:
        """To held-out prompts, outside any iteration: seeds go by the set, and are no iteration's. show: what comes."""
        found = []
        with self.engine_awake():
            for heldout in sets:
                show(heldout)
                found.append(heldout_rollout(self.generator, heldout))
        return found

    def greedy_responses(self, prompts: PromptBatch) -> RolloutBatch:
        """One to each, as an evaluation on the only held-out set has them."""
        [responses] = self.heldout_responses([HeldoutSet("", prompts)])
        return responses

    @contextlib.contextmanager
    def engine_awake(self) -> Iterator[None]:
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

    def _sampled_alone(self, prompts: PromptBatch, iteration: int, deferred: DeferredRows) -> RolloutBatch:
        """What is scored while others generate; of one that an earlier start has kept, in the same units."""
        rollout = self._hooks.load_rollout(prompts, iteration)
        self._begin_scoring(prompts, deferred, generates=rollout is None)
        if rollout is None:
            with self.engine_awake(), self._watch.phase("generate"):
                rollout = self._rollout(SAMPLED, prompts, iteration, self.scoring)
            self._hooks.save_rollout(iteration, rollout.tensors())
        self._num_sampled = 1  # also where an earlier start has sampled them
        self.scoring.assign_rest(rollout)
        return rollout

    def _begin_scoring(self, prompts: PromptBatch, deferred: DeferredRows, *, generates: bool) -> None:
        """Cut the responses to these prompts in units of scoring. generates: the responses are yet to come."""
        self.scoring.begin(
            prompts,
            self._sampling.samples.for_lengths(prompts.lengths.tolist()),
            limits=self._sampling.limits,
            generates=generates,
            left_out={self._roles.actor: deferred(prompts)} if self._roles.actor is not None else {},
        )

    def _rollout(
        self, how: Sampled | Greedy, prompts: PromptBatch, iteration: int, listener: OverlappedScoring | None = None
    ) -> RolloutBatch:
        greedy = isinstance(how, Greedy)
        generation = 0 if greedy else self._num_sampled
        self._num_sampled += not greedy
        rollout = self.generator.generate(
            prompts,
            temperature=0.0 if greedy else None,
            samples_per_prompt=always(1) if greedy else self._sampling.samples,
            iteration=iteration,
            first_prompt=self._first_prompt,
            generation=generation,
            listener=listener,
        )
        self.num_generated += rollout.num_response_tokens
        self.generator.count_work(rollout, self._watch)
        return rollout
