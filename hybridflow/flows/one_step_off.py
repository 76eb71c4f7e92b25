"""One-step-off rollouts: engines on ranks of their own generate the next rollout while the models train on this one.

    iteration k: hand over rollout k | draw prompts, sync weights | [engines: rollout k + 1] beside [flow on rollout k]

Rollout k + 1 is of the weights that iteration k begins with, and so one update older than those that train on it.
All tokens of a rollout are of one version, and seeds have the number of the iteration that trains: what is drawn
depends neither on the clock nor on how many engine replicas there are. Rollout 1 is made with the first weights while
nobody trains, and the last iteration makes no next rollout.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState, Tensors
from hybridflow.config import ExperimentConfig
from hybridflow.errors import FlowError
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.generation import (
    NO_IDS,
    SAMPLED,
    DeferredRows,
    Delivered,
    GenerationCosts,
    Kinds,
    Moment,
    Numbers,
    PromptDraw,
)
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.flows.synchronous import costs_of, forget_measures, heldout_rollout
from hybridflow.models.routing import as_record
from hybridflow.parallel.engine_orders import END, EngineOrders
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.platform import world_group
from hybridflow.recording.engine_report import EngineReport, engine_metrics
from hybridflow.recording.iteration import Metrics
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor
from hybridflow.rollout.generation import RolloutRequest
from hybridflow.rollout.routing_records import EXPERTS, RoutingRecords
from hybridflow.rollout.rows import TurnCounts

NEXT = "next_rollout"  # in `RunState.kept`: a rollout's tensors, and these
PROMPTS, NUMBERS, REPORT = "prompts", "numbers", "report"
EARLIER = "Set rollout.max_staleness=0 for this flow. While engines generate ahead, a flow may ask in an iteration for"


@dataclass(eq=False)
class PlannedRollout:
    """A rollout that engines generate. asked: set when engines begin. rollout, report: set when engines deliver."""

    draw: PromptDraw
    iteration: int = 0  # of the seeds
    version: int = 0
    asked: RolloutRequest | None = None
    rollout: RolloutBatch | None = None
    report: EngineReport | None = None

    def tensors(self) -> Tensors:
        """For a checkpoint, of one that is handed over. prompts: numbers in the data set. numbers: the iteration of the
        seeds, how many prompts the run has drawn with these, the actor's version. report: of the engines' ranks.
        """
        assert self.rollout is not None and self.report is not None, "engines have not handed it over"
        numbers = torch.tensor([self.iteration, self.draw.position, self.version], dtype=torch.int64)
        prompts = torch.tensor(self.draw.numbers, dtype=torch.int64)
        return {**self.rollout.tensors(), PROMPTS: prompts, NUMBERS: numbers, REPORT: self.report.tensor()}


class OneStepOff:
    """The `Source` on the ranks that train. Engine ranks take part in the collectives by `orders`.

    everyone: the exchange of all ranks. stop: called when an engine rank has a request to end. kept: the next rollout
    of a checkpoint. goes_on: whether this start has a checkpoint.
    """

    models_in_place = True

    def __init__(
        self,
        generator: Generator,
        scoring: OverlappedScoring,
        actor: Actor | None,
        config: ExperimentConfig,
        *,
        draws: PromptDraws,
        orders: EngineOrders,
        everyone: Exchange,
        stop: Callable[[], None],
        hooks: RunHooks,
        kept: Tensors | None,
        goes_on: bool,
    ) -> None:
        self.scoring, self._generator, self._actor, self._sampling = scoring, generator, actor, config.sampling
        self._data, self._begins_rows = draws, config.data.environment is not None
        self._orders, self._everyone, self._stop, self._hooks = orders, everyone, stop, hooks
        self._iteration = self._last = self._num_generated = 0
        self._has_delivered = False  # since the last draw
        self._engine_version: int | None = None
        self._kept, self._goes_on = kept, goes_on
        self._current: PlannedRollout | None = None
        self._next: PlannedRollout | None = None
        self._used: list[PlannedRollout] = []  # in this iteration

    def begin_run(self) -> list[str]:
        """See `Source`. Engines begin, too."""
        self._orders.give("begin")
        lines = self._generator.notes()
        if self._goes_on and self._kept is None:
            lines.append(
                "rollout.max_staleness: the checkpoint has no next rollout. The first rollout of this start is of the "
                "present weights, and the run is not equal to one that was as long from the start"
            )
        return lines

    # ---- prompts

    def draw(self, position: int) -> PromptDraw:
        """See `Source`: those of the rollout that is under way, if there is one."""
        self._has_delivered = False
        if self._kept is not None:
            self._next, self._kept = self._restored(position, self._kept), None
        self._current, self._next = self._next or PlannedRollout(self._drawn(position)), None
        return self._current.draw

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """See `Source`. Where an environment begins rows, after the rollout that is under way."""
        if self._begins_rows:
            self._orders.give("prompts", numbers=list(numbers))
        return self._data.at(numbers)

    def _drawn(self, position: int) -> PromptDraw:
        self._orders.give("draw", position=position)
        return self._data.draw(position)

    # ---- an iteration

    def begin(self, iteration: int, num_iterations: int) -> Tensor:
        """See `Source`: the next rollout needs its records."""
        forget_measures(self._generator)
        self._iteration, self._last, self._used, self._num_generated = iteration, num_iterations, [], 0
        needed = None if self._next is None or self._next.rollout is None else self._next.rollout.record_ids
        return NO_IDS if needed is None else needed

    def responses(self, kinds: Kinds, numbers: Numbers, prompts: PromptBatch, deferred: DeferredRows) -> Delivered:
        """The rollout of the prompts; engines begin the next one. Errors: FlowError."""
        if list(kinds) != [SAMPLED] or self._has_delivered:
            raise FlowError(f"{EARLIER} one sampled rollout of its prompts, and nothing else")
        iteration = self._iteration
        planned = self._current
        assert planned is not None, "the prompts of an iteration are drawn when it begins"
        if planned.asked is None and planned.rollout is None:
            self._start(planned, iteration, iteration - 1)
        rollout = self._handed_over(planned)
        self._num_generated += rollout.num_response_tokens
        self._used.append(planned)
        self._has_delivered = True
        if iteration < self._last:
            self._next = PlannedRollout(self._drawn(planned.draw.position))
            self._start(self._next, iteration + 1, iteration - 1)
        draw = planned.draw
        self.scoring.begin(draw.batch, deferred)
        self.scoring.assign_rest(rollout)
        return Delivered(draw.numbers, draw.batch, (rollout,))

    def _start(self, planned: PlannedRollout, iteration: int, version: int) -> None:
        """Engines begin to generate, with the weights of `version`, which the actor has now."""
        self._sync(version)
        draw, planned.iteration, planned.version = planned.draw, iteration, version
        planned.asked = self._generator.build_request(
            draw.batch, samples_per_prompt=self._sampling.samples, iteration=iteration, first_prompt=draw.first
        )
        self._orders.give("generate", iteration=iteration)

    def _sync(self, version: int) -> None:
        if self._engine_version != version:
            self._orders.give("sync")
            self._generator.sync_weights()
            self._engine_version = version

    def _handed_over(self, planned: PlannedRollout) -> RolloutBatch:
        """The rollout, once engines have all of it."""
        if planned.rollout is None:
            assert planned.asked is not None, "nobody has been asked for it"
            self._hooks.show(f"iteration {self._iteration}: waiting for the engines")
            self._orders.give("hand_over")
            begun = time.perf_counter()
            rollout = self._generator.gather_rollout(planned.asked, {})
            waited = {"time/trainers_wait_seconds": time.perf_counter() - begun}
            planned.rollout = replace(rollout, versions=versions_of(rollout, planned.version))
            planned.report = EngineReport.exchanged(self._everyone, waited, self._no_turns())
            if planned.report.largest["told to end"]:
                self._stop()
        return planned.rollout

    def _no_turns(self) -> list[float]:
        counts = self._generator.turn_counts
        return [] if counts is None else [0.0] * len(counts.names())

    # ---- what is kept

    def state(self, state: RunState, moment: Moment) -> RunState:
        """See `Source`: the next rollout, which engines hand over first. Before an iteration that ends early the
        iteration's rollout, as far as there is one.
        """
        if NEXT in state.kept:
            return state
        planned = self._next
        if moment != "after":
            planned = self._used[0] if self._used else self._current
            if planned is not None and planned.rollout is None and (moment == "failed" or planned.asked is None):
                planned = None
        if planned is None:
            return state
        self._handed_over(planned)
        return state.keeping(NEXT, planned.tensors())

    def _restored(self, position: int, kept: Tensors) -> PlannedRollout:
        """What a checkpoint has. The prompts are drawn again, and with them the rows that are passed over."""
        tensors = dict(kept)
        prompts, numbers, report = (tensors.pop(name) for name in (PROMPTS, NUMBERS, REPORT))
        iteration, drawn, version = numbers.tolist()
        draw, named = self._drawn(position), tuple(prompts.tolist())
        if draw.numbers != named or draw.position != drawn:  # an environment now begins other rows
            draw = replace(draw, batch=self.at(named), numbers=named, position=drawn)
        rollout = rollout_of(tensors, None if self._actor is None else self._actor.records, iteration)
        return PlannedRollout(draw, iteration, version, rollout=rollout, report=EngineReport.of_tensor(report))

    def close(self, *, saved: bool | None) -> None:
        """See `Source`: engines end, and drop a rollout that is under way."""
        self._orders.give(END, saved=saved)
        dist.barrier(group=world_group())

    # ---- evaluation

    def evaluate(
        self, iteration: int, sets: Callable[[], Sequence[HeldoutSet]], *, whole: bool
    ) -> list[tuple[HeldoutSet, RolloutBatch]]:
        """See `Source`: after the rollout under way, and with weights that the next rollout takes as well."""
        if self._next is not None:
            self._handed_over(self._next)
        self._sync(iteration)
        self._orders.give("evaluate", iteration=iteration, whole=whole)
        return [(heldout, heldout_rollout(self._generator, heldout)) for heldout in sets()]

    # ---- numbers

    @property
    def _report(self) -> EngineReport | None:
        reports = [planned.report for planned in self._used if planned.report is not None]
        return functools.reduce(EngineReport.joined, reports) if reports else None

    def _turns(self) -> TurnCounts | None:
        """Those of all engines, on the first rank that trains."""
        counts, report = self._generator.turn_counts, self._report
        if counts is None or report is None or dist.get_rank():
            return counts
        return TurnCounts(**dict(zip(counts.names(), report.turns, strict=True)))  # type: ignore[arg-type]  # whole ones

    def costs(self) -> GenerationCosts:
        """See `Source`."""
        return replace(costs_of(self._generator, self._num_generated), turns=self._turns())

    def metrics(self, of_trainers: Mapping[str, float | Tensor], num_trainers: int) -> Metrics:
        """See `Source`: engines have reported theirs."""
        report = self._report
        return {} if report is None else engine_metrics(report, self._num_generated, dict(of_trainers), num_trainers)


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
    return torch.full((len(rollout.input_ids), 1), version, dtype=torch.int32)
