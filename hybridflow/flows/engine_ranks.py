"""What a rank does that has an engine and trains nothing, where rollouts are generated while models train.

    EngineRanks(...).serve()      # until the run ends

It does what the ranks that train order, one order after the other (`parallel.engine_orders`). Orders name no tensors:
prompts are drawn, and weights received, on all ranks together.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hybridflow.config import ExperimentConfig
from hybridflow.errors import Stopped
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.evaluate import HeldoutSet
from hybridflow.flows.generation import NO_IDS, PromptDraw
from hybridflow.flows.synchronous import heldout_rollout
from hybridflow.parallel.engine_orders import END, EngineOrders
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.platform import Platform, fresh_store, world_group
from hybridflow.parallel.rank_log import open_rank_log
from hybridflow.parallel.store_client import StoreClient
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.placed import PlacedRun
from hybridflow.recording.engine_report import EngineReport
from hybridflow.recording.measure import Stopwatch
from hybridflow.roles.generator import Generator
from hybridflow.rollout.generation import RolloutRequest
from hybridflow.rollout.routing_records import RoutingRecords
from hybridflow.rollout.row import RolloutRow

STEPS = 16  # of the engine between two looks whether the run ends
GENERATE = "generate"


class _RunEnds(Exception):
    """Nobody wants the rollout any more."""


@dataclass
class _UntilTheEnd:
    """Stops a rollout that nobody wants, on all ranks of an engine replica after the same step."""

    orders: EngineOrders
    group: dist.ProcessGroup | None  # of the replica; None of one rank
    leader: int
    steps: int = field(default=0)

    def on_response(self, row: int, response: RolloutRow) -> None:
        """See `RolloutListener`."""

    def on_engine_step(self) -> None:
        """See `RolloutListener`. Errors: _RunEnds."""
        self.steps += 1
        if self.steps % STEPS:
            return
        ends = torch.tensor(int(self.group is None or dist.get_rank() == self.leader) and int(self.orders.ends()))
        if self.group is not None:
            dist.broadcast(ends, src=self.leader, group=self.group)
        if ends:
            raise _RunEnds

    def on_replica_done(self, prompts: Sequence[int], responses: Sequence[RolloutRow]) -> None:
        """See `RolloutListener`."""

    def on_failure(self) -> None:
        """See `RolloutListener`."""


@dataclass(frozen=True)
class EnginesApart:
    """Engines that generate while models train on other ranks.

    everyone: the exchange of all ranks. trainers: the group of those that train, None on a rank that serves. replica:
    the ranks of this rank's engine, none on a rank that trains; group: theirs, None of one rank.
    """

    everyone: Exchange
    trainers: dist.ProcessGroup | None
    trainer_ranks: tuple[int, ...]
    orders: EngineOrders
    replica: tuple[int, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of_run(cls, placed: PlacedRun, groups: ProcessGroups, platform: Platform) -> "EnginesApart | None":
        """None where models and engine take turns. Collective over the world."""
        if not placed.config.rollout.is_one_step_off:
            return None
        layout, rank = placed.rollout, platform.rank
        trainers = tuple(rank for rank in range(placed.world_size) if rank not in layout)
        store = StoreClient(fresh_store(), "orders")
        own = layout.replicas[layout.coordinates(rank).replica] if rank in layout else ()
        return cls(
            everyone=Exchange(world_group(), platform.device),
            trainers=groups.own([trainers]),
            trainer_ranks=trainers,
            orders=EngineOrders(store, gives=rank == trainers[0]),
            replica=own,
            group=groups.own(layout.replicas) if len(layout.replicas[0]) > 1 else None,
        )

    @property
    def serves(self) -> bool:
        """Whether this rank has an engine and trains nothing."""
        return self.trainers is None


class EngineRanks:
    """The loop of a rank that generates and trains nothing. sets: (iteration, whole) -> held-out sets to evaluate.

    look_at_inputs: what all ranks do together before the first iteration, where an environment begins rows.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        generator: Generator,
        apart: EnginesApart,
        *,
        draws: PromptDraws,
        sets: Callable[[int, bool], Sequence[HeldoutSet]],
        look_at_inputs: Callable[[], object],
        records: RoutingRecords | None,
        watchdog: Watchdog,
        watch: Stopwatch,
    ) -> None:
        self._config, self._generator, self._apart, self._orders = config, generator, apart, apart.orders
        self._draws, self._sets, self._look_at_inputs, self._records = draws, sets, look_at_inputs, records
        self._watchdog, self._watch = watchdog, watch
        self._draw: PromptDraw | None = None
        self._asked: RolloutRequest | None = None
        self._own: Mapping[int, RolloutRow] = {}
        self._idle_since, self._idle_seconds = time.perf_counter(), 0.0

    def serve(self) -> None:
        """Do what is ordered until the run ends. Errors: Stopped where the run ends early."""
        while (order := self._orders.next())["act"] != END:
            match order["act"]:
                case "begin":
                    open_rank_log()
                    self._look_at_inputs()
                case "draw":
                    self._draw = self._draws.draw(order["position"])
                case "prompts":
                    self._draws.at(order["numbers"])
                case "sync":
                    with self._watchdog.phase("rollout"):
                        self._generator.sync_weights()
                case "generate":
                    self._respond(order["iteration"])
                case "hand_over":
                    self._hand_over()
                case "evaluate":
                    self._evaluate(order["iteration"], whole=order["whole"])
                case unknown:
                    raise AssertionError(f"no engine knows the order {unknown!r}")
        dist.barrier(group=world_group())
        if order["saved"] is not None:
            raise Stopped("where the models train", saved=order["saved"])

    def _respond(self, iteration: int) -> None:
        assert self._draw is not None, "prompts are drawn first"
        self._stop_waiting()
        samples, draw = self._config.sampling.samples, self._draw
        self._asked = self._generator.build_request(
            draw.batch, samples_per_prompt=samples, iteration=iteration, first_prompt=draw.first
        )
        until = _UntilTheEnd(self._orders, self._apart.group, self._apart.replica[0])
        try:
            with self._watchdog.phase("rollout"), self._watch.stage(GENERATE):
                self._own = self._generator.responses(self._asked, until)
        except _RunEnds:
            self._own = {}
        self._idle_since = time.perf_counter()

    def _stop_waiting(self) -> None:
        """From now on this rank works; what it waited for orders until now is counted."""
        self._idle_seconds += time.perf_counter() - self._idle_since

    def _hand_over(self) -> None:
        assert self._asked is not None, "nothing was asked for"
        with self._watchdog.phase("rollout"):
            rollout = self._generator.gather_rollout(self._asked, self._own)
            if self._records is not None:  # which are with the trainers now
                self._records.keep_only(NO_IDS)
            with self._watch.phase(GENERATE):
                self._generator.count_work(rollout, self._watch)
            counts = self._generator.turn_counts
            EngineReport.exchanged(self._apart.everyone, self._measured(), [] if counts is None else counts.values())
        self._asked, self._own = None, {}
        self._forget_measures()

    def _measured(self) -> dict[str, float]:
        costs, watch = self._generator.costs, self._watch
        return {
            **self._generator.pop_cache_use(),
            "time/generate_seconds": watch.seconds[GENERATE],
            "time/engines_wait_seconds": self._idle_seconds,
            "reshard/seconds": sum(cost.seconds for cost in costs),
            "reshard/bytes_received": sum(cost.bytes_received for cost in costs),
            "reshard/bytes_permuted": sum(cost.bytes_permuted for cost in costs),
            "reshard/peak_extra_bytes": max((cost.peak_extra_bytes for cost in costs), default=0),
            "memory/engine_own_weight_bytes": self._generator.own_bytes,
            "memory/peak_rollout_mb": watch.peaks_mb.get(GENERATE, 0.0),
            "told to end": float(self._watchdog.stop.requested is not None),
            "flops": watch.flops.get(GENERATE, 0.0),
            "ideal seconds": watch.ideal_seconds.get(GENERATE, 0.0),
            "engine ranks": 1.0,
        }

    def _forget_measures(self) -> None:
        self._watch.reset()
        self._idle_seconds = 0.0
        self._generator.costs.clear()
        if self._generator.turn_counts is not None:
            self._generator.turn_counts.clear()

    def _evaluate(self, iteration: int, *, whole: bool) -> None:
        self._stop_waiting()
        with self._watchdog.phase("evaluate"):
            for heldout in self._sets(iteration, whole):
                heldout_rollout(self._generator, heldout)
        self._idle_since = time.perf_counter()
        self._generator.pop_cache_use()
        if self._generator.turn_counts is not None:
            self._generator.turn_counts.clear()
