"""One-step-off rollouts: engines on ranks of their own generate the next rollout while the models train on this one.

    iteration k: hand over rollout k | draw prompts, sync weights | [engines: rollout k + 1] beside [flow on rollout k]

Rollout k + 1 is of the weights that iteration k begins with, and so one update older than those that train on it.
All tokens of a rollout are of one version, and seeds have the number of the iteration that trains: what is drawn
depends neither on the clock nor on how many engine replicas there are. Rollout 1 is made with the first weights while
nobody trains, and the last iteration makes no next rollout.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import NO_VERSIONS, PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import NextRollout, RunState
from hybridflow.errors import FlowError
from hybridflow.flows.draws import Draws, PromptDraw
from hybridflow.flows.generation import NO_IDS, SAMPLED, DeferredRows, Generation, Greedy, Sampled
from hybridflow.models.routing import as_record
from hybridflow.parallel.engine_orders import END, EngineOrders
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.platform import world_group
from hybridflow.recording.engine_report import EngineReport, engine_metrics
from hybridflow.recording.iteration import Metrics
from hybridflow.roles.generator import Generator
from hybridflow.rollout.generation import AskedResponses, RowResponses
from hybridflow.rollout.routing_records import EXPERTS, RoutingRecords
from hybridflow.rollout.turns import TurnCounts

EARLIER = "rollout.max_staleness: a rollout is under way before the flow asks for it, so that the flow may ask for"


@dataclass(eq=False)
class PlannedRollout:
    """asked: once engines have begun. rollout, report: once they have handed it over."""

    draw: PromptDraw
    iteration: int = 0  # of the seeds
    version: int = 0
    asked: AskedResponses | None = None
    rollout: RolloutBatch | None = None
    report: EngineReport | None = None

    def for_checkpoint(self) -> NextRollout:
        """Of one that is handed over."""
        assert self.rollout is not None and self.report is not None, "engines have not handed it over"
        return NextRollout(
            self.iteration,
            self.draw.numbers,
            self.draw.position,
            self.version,
            report=self.report.tensor(),
            tensors=self.rollout.tensors(),
        )


class OneStepOffGeneration(Generation):
    """Of the ranks that train; it draws the prompts, too. Calls are collective over them, and engines take part.

    begins_rows: an environment does, on all ranks together.
    everyone: the exchange of all ranks. following: the rollout that a checkpoint has. goes_on: there is a
    checkpoint.
    stop: takes the wish of an engine's rank that the run end.
    """

    generator: Generator

    def __init__(
        self,
        generator: Generator,
        *given: Any,
        draws: Draws,
        begins_rows: bool,
        orders: EngineOrders,
        everyone: Exchange,
        stop: Callable[[], None],
        following: NextRollout | None,
        goes_on: bool,
        **named: Any,
    ) -> None:
        super().__init__(generator, *given, **named)
        self.draws = self  # the prompts of an iteration are those of the rollout
        self._data, self._begins_rows = draws, begins_rows
        self._orders, self._everyone, self._stop = orders, everyone, stop
        self._iteration = self._last = 0
        self._engine_version: int | None = None
        self._kept, self._goes_on = following, goes_on
        self._current: PlannedRollout | None = None
        self._next: PlannedRollout | None = None
        self._used: list[PlannedRollout] = []  # in this iteration

    def notes(self) -> list[str]:
        """See `Generation`."""
        if not self._goes_on or self._kept is not None:
            return []
        return [
            "rollout.max_staleness: the checkpoint has no next rollout. The first rollout of this start is of the "
            "present weights, and the run is not equal to one that was as long from the start"
        ]

    def begin_run(self) -> None:
        """See `Generation`."""
        self._orders.give("begin")

    # ---- prompts

    def draw(self, position: int) -> PromptDraw:
        """See `Draws`: those of the rollout that is under way, if there is one."""
        if self._kept is not None:
            self._next, self._kept = self._restored(position, self._kept), None
        self._current, self._next = self._next or PlannedRollout(self._drawn(position)), None
        return self._current.draw

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """See `Draws`. Where an environment begins rows, after the rollout that is under way."""
        if self._begins_rows:
            self._orders.give("prompts", numbers=list(numbers))
        return self._data.at(numbers)

    def _drawn(self, position: int) -> PromptDraw:
        self._orders.give("draw", position=position)
        return self._data.draw(position)

    # ---- an iteration

    def begin(self, iteration: int, num_iterations: int) -> None:
        """See `Generation`."""
        super().begin(iteration, num_iterations)
        self._iteration, self._last, self._used = iteration, num_iterations, []

    def responses(
        self, kinds: Sequence[Sampled | Greedy], prompts: PromptBatch, iteration: int, deferred: DeferredRows
    ) -> tuple[RolloutBatch, ...]:
        """The rollout of the prompts; engines begin the next one. Errors: FlowError."""
        if list(kinds) != [SAMPLED] or self._num_sampled:
            raise FlowError(f"{EARLIER} one sampled rollout of its prompts, and nothing else")
        planned = self._current
        assert planned is not None, "the prompts of an iteration are drawn when it begins"
        if planned.asked is None and planned.rollout is None:
            self._start(planned, iteration, iteration - 1)
        rollout = self._handed_over(planned)
        self.num_generated += rollout.num_response_tokens
        self._used.append(planned)
        self._num_sampled = 1
        if iteration < self._last:
            self._next = PlannedRollout(self._drawn(planned.draw.position))
            self._start(self._next, iteration + 1, iteration - 1)
        self._begin_scoring(prompts, deferred, generates=False)
        self.scoring.assign_rest(rollout)
        return (rollout,)

    def _start(self, planned: PlannedRollout, iteration: int, version: int) -> None:
        """Engines begin to generate, with the weights of `version`, which the actor has now."""
        self._sync(version)
        draw, planned.iteration, planned.version = planned.draw, iteration, version
        planned.asked = self.generator.ask(
            draw.batch, samples_per_prompt=self._sampling.samples, iteration=iteration, first_prompt=draw.first
        )
        self._orders.give("generate", iteration=iteration)

    def _sync(self, version: int) -> None:
        if self._engine_version != version:
            self._orders.give("sync")
            self.generator.sync_weights()
            self._engine_version = version

    def _handed_over(self, planned: PlannedRollout) -> RolloutBatch:
        """The rollout, once engines have all of it."""
        if planned.rollout is None:
            assert planned.asked is not None, "nobody has been asked for it"
            self._hooks.show(f"iteration {self._iteration}: waiting for the engines")
            self._orders.give("hand_over")
            begun = time.perf_counter()
            rollout = self.generator.gathered(planned.asked, RowResponses())
            waited = {"time/trainers_wait_seconds": time.perf_counter() - begun}
            planned.rollout = replace(rollout, versions=versions_of(rollout, planned.version))
            planned.report = EngineReport.exchanged(self._everyone, waited, self._no_turns())
            if planned.report.largest["told to end"]:
                self._stop()
        return planned.rollout

    def _no_turns(self) -> list[float]:
        counts = self.generator.turn_counts
        return [] if counts is None else [0.0] * len(counts.names())

    # ---- what is kept

    def completed(self, state: RunState) -> RunState:
        """The state of a checkpoint: with the next rollout, which engines hand over first."""
        if self._next is None or state.next_rollout is not None:
            return state
        self._handed_over(self._next)
        return replace(state, next_rollout=self._next.for_checkpoint())

    def kept(self, before: RunState, *, failed: bool = False) -> RunState:
        """The state before an iteration that ends early: with the iteration's rollout, as far as there is one."""
        planned = self._used[0] if self._used else self._current
        if planned is None or (planned.rollout is None and (failed or planned.asked is None)):
            return before
        self._handed_over(planned)
        return replace(before, next_rollout=planned.for_checkpoint())

    def _restored(self, position: int, kept: NextRollout) -> PlannedRollout:
        """What a checkpoint has. The prompts are drawn again, and with them the rows that are passed over."""
        draw = self._drawn(position)
        if draw.numbers != kept.prompts or draw.position != kept.position:  # an environment now begins other rows
            draw = replace(draw, batch=self.at(kept.prompts), numbers=kept.prompts, position=kept.position)
        actor = self._roles.actor
        rollout = rollout_of(kept.tensors, None if actor is None else actor.records, kept.iteration)
        report = EngineReport.of_tensor(kept.report)
        return PlannedRollout(draw, kept.iteration, kept.version, rollout=rollout, report=report)

    def kept_records(self) -> Tensor:
        """See `Generation`."""
        return NO_IDS if self._next is None or self._next.rollout is None else self._next.rollout.record_ids

    def end(self, *, saved: bool | None) -> None:
        """Engines end; a rollout that is under way is dropped. saved: of a run that was stopped; None: all is done."""
        self._orders.give(END, saved=saved)
        dist.barrier(group=world_group())

    # ---- evaluation

    def begin_evaluation(self, iteration: int, *, whole: bool) -> None:
        """See `Generation`: after the rollout under way, and with weights that the next rollout takes as well."""
        if self._next is not None:
            self._handed_over(self._next)
        self._sync(iteration)
        self._orders.give("evaluate", iteration=iteration, whole=whole)

    @contextlib.contextmanager
    def engine_awake(self) -> Iterator[None]:
        """See `Generation`: engines on ranks of their own are never asleep, and a sync has brought the weights."""
        yield

    # ---- numbers

    @property
    def _report(self) -> EngineReport | None:
        reports = [planned.report for planned in self._used if planned.report is not None]
        return functools.reduce(EngineReport.joined, reports) if reports else None

    @property
    def turn_counts(self) -> TurnCounts | None:
        """Those of all engines, on the first rank that trains."""
        counts, report = self.generator.turn_counts, self._report
        if counts is None or report is None or self._platform.rank:
            return counts
        return TurnCounts(**dict(zip(counts.names(), report.turns, strict=True)))  # type: ignore[arg-type]  # whole ones

    def metrics(self, batch: RolloutBatch, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """See `Generation`."""
        report = self._report
        return {} if report is None else engine_metrics(report, self.num_generated, dict(of_trainers), num_trainers)


def rollout_of(tensors: Mapping[str, Tensor], records: RoutingRecords | None, iteration: int) -> RolloutBatch:
    """A rollout as a file has it, for an iteration. records: take the engine's experts; None: nobody replays them.

    Local.
    """
    rollout = RolloutBatch(**{name: tensor for name, tensor in tensors.items() if name != EXPERTS})
    if records is None or EXPERTS not in tensors:
        return rollout
    return records.take(rollout, as_record(tensors[EXPERTS]), iteration)


def versions_of(rollout: RolloutBatch, version: int) -> Tensor:
    """(T, 1) int32: one version for all tokens."""
    return NO_VERSIONS.new_full((len(rollout.input_ids), 1), version)
