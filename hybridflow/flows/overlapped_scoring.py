"""Score finished responses while other engine replicas still generate.

    scoring.begin(prompts, deferred, generates=True)  # cut in units, before a token is generated
    generator.generate(..., listener=scoring)        # calls on_response, on_engine_step, on_replica_done
    scoring.assign_rest(rollout)                     # one exchange: who has done what; the rest is dealt out
    run.scores(rollout), reference.log_probs(rollout), ...

Worker processes call users' functions, where the config allows, from the first finished prompt on. A replica without
responses to wait for runs units, model after model, until the last replica is done. The replica's units come first, and
then units that others announce, which still generate. Results depend on the units alone; units follow from the prompts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config.sampling import SamplingConfig
from hybridflow.flows.generation import DeferredRows
from hybridflow.flows.work_queue import TokenLists, WorkQueue
from hybridflow.parallel.device import CPU
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.parallel.store_client import StoreClient
from hybridflow.placement.overlapped_scoring import UNITS_PER_BLOCK, Block
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.calls import Group, RolloutCalls
from hybridflow.rewards.scorer import Scorer
from hybridflow.roles.base import Role
from hybridflow.roles.precomputed_scores import PrecomputedScores, ScoringUnits, cut_in_units, tokens_of_units
from hybridflow.rollout.generation import prompts_of_replicas, responses_to
from hybridflow.rollout.row import RolloutRow

PHASE = "scored_while_waiting"
LOOK_SECONDS = 0.05  # between two looks for somebody who waits, while this replica generates
ASKS_PER_SECOND = 10_000  # of all replicas that wait with nothing to do, together
NOTES_PER_SECOND = 300_000  # that the store hands out to them: each asks for those of all replicas
TakenUnit = tuple[int, TokenLists | None]  # a unit, with the responses where another replica has generated them
Step = tuple[int, tuple[TakenUnit, ...]]  # a model and units for it


@dataclass(frozen=True)
class OverlappedModel:
    """A model that scores while others generate, the call that scores, and the blocks on each replica's ranks."""

    role: Role
    results: Callable[[RolloutBatch], PartialTensor]
    blocks: Mapping[int, Sequence[Block]]

    @property
    def ahead(self) -> PrecomputedScores:
        assert self.role.ahead is not None, "nothing has begun"
        return self.role.ahead


@dataclass(frozen=True)
class _Unfinished:
    """Responses that are wanted together, as far as they are there, by row."""

    number: int  # of a prompt, or of a unit
    rows: tuple[int, ...]
    responses: dict[int, list[int]]

    def add(self, row: int, response: RolloutRow) -> bool:
        """Whether it was the last."""
        self.responses[row] = response.token_ids
        return len(self.responses) == len(self.rows)

    def in_order(self) -> tuple[list[int], ...]:
        return tuple(self.responses[row] for row in self.rows)


class OverlappedScoring:
    """Of this rank. Building it is collective over the world, and so are `begin` and `assign_rest`.

    models: those of `placement.overlapped_scoring.overlapped_models`, alike on all ranks; with a store client.
    sampling: says how many responses a prompt has, and how long.
    """

    def __init__(
        self,
        models: Sequence[OverlappedModel],
        scorer: Scorer | None,
        layout: RolloutLayout,
        *,
        actor: Role | None,
        sampling: SamplingConfig,
        rank: int,
        groups: ProcessGroups,
        notices: StoreClient | None,
        exchange: Exchange,
        watch: Stopwatch,
    ) -> None:
        self._models, self._scorer, self._layout, self._rank = tuple(models), scorer, layout, rank
        self._actor, self._sampling, self._exchange, self._watch = actor, sampling, exchange, watch
        shared = self._models and len(layout.replicas[0]) > 1
        self._group = groups.own(layout.replicas) if shared else None
        self._replica = layout.coordinates(rank).replica if rank in layout else None
        self._board: WorkQueue | None = None  # of the first rank of a replica, which asks for the others
        if notices is not None and self._replica is not None and layout.contributes(rank):
            self._board = WorkQueue(notices, self._replica, len(layout.replicas))
        self._num_shares = max((model.role.grid.dp for model in self._models), default=1)
        self._calls: RolloutCalls | None = None
        self._begun = False

    def begin(self, prompts: PromptBatch, deferred: DeferredRows, *, generates: bool = False) -> None:
        """Cut the responses to these prompts in units.

        deferred: rows of a sampled rollout of such prompts for which the actor is not asked. generates: the responses
        are yet to come.
        """
        lengths, limits = prompts.lengths.tolist(), self._sampling.limits
        samples = self._sampling.samples.for_lengths(lengths)
        self._prompts, self._samples, self._begun = prompts, torch.tensor(samples, dtype=torch.int64), True
        shares = prompts_of_replicas(prompts, self._samples, limits, len(self._layout.replicas))
        longest = torch.tensor(limits.for_lengths(lengths), dtype=torch.int64)
        costs = (prompts.lengths + self._samples * longest).tolist()
        per_replica = UNITS_PER_BLOCK * ceil(self._num_shares / len(self._layout.replicas))
        self._units = cut_in_units(shares, samples, costs, per_replica=per_replica, num_shares=self._num_shares)
        for model in self._models:
            left_out = deferred(prompts) if model.role is self._actor else ()
            model.role.ahead = PrecomputedScores(self._units.without(left_out))
        self._calls = self._scorer.call_ahead(prompts) if self._scorer is not None else None
        self._of_prompts = _by_row(self._own_prompts(shares, samples) if self._calls is not None else [])
        self._of_units: dict[int, _Unfinished] = {}
        if self._board is not None and generates:
            self._board.begin()
            self._of_units = _by_row([(unit, self._units.rows[unit]) for unit in self._own_units()])
        self._ready: list[_Unfinished] = []  # units that are not announced yet
        self._looked = 0.0

    def disable(self) -> None:
        """Until the next `begin` no unit is scored early, and results of earlier units are dropped."""
        for model in self._models:
            model.role.ahead = None
        self._begun = False

    # ---- while it is generated

    def on_response(self, row: int, response: RolloutRow) -> None:
        """See `RolloutListener`. Calls the functions after the last response to a prompt."""
        group = self._of_prompts.get(row)
        if group is not None and group.add(row, response):
            assert self._calls is not None, "there are groups only where functions are called"
            self._calls.submit(Group(group.number, group.rows, group.in_order()))
        unit = self._of_units.get(row)
        if unit is not None and unit.add(row, response):
            self._ready.append(unit)

    def on_engine_step(self) -> None:
        """See `RolloutListener`. Announces units whose responses are all there, once somebody waits."""
        if not self._ready or time.monotonic() < self._looked + LOOK_SECONDS:
            return
        assert self._board is not None, "the first rank of a replica"
        if self._board.others_generate():
            for unit in self._ready:
                self._board.announce(unit.number, unit.in_order())
            self._ready.clear()
        self._looked = time.monotonic()

    def on_failure(self) -> None:
        """See `RolloutListener`."""
        if self._board is not None:
            self._board.done()

    def on_replica_done(self, prompts: Sequence[int], responses: Sequence[RolloutRow]) -> None:
        """See `RolloutListener`. Run units of scoring, one after the other, until all replicas have generated."""
        if not self._models:
            return
        units = self._own_units()
        self._own = responses_to(self._prompts, prompts, self._samples, responses)
        self._places = _places_within(self._units, units)
        self._pending = {i: list(units) for i, model in enumerate(self._models) if self._blocks(model)}
        self._own_numbers = set(units)
        if self._board is not None:
            self._board.done()
        while (step := self._agreed(self._next_step())) is not None:
            number, taken = step
            with self._watch.phase(PHASE):
                for (unit, given), block in zip(taken, self._blocks(self._models[number]), strict=False):
                    if self._rank in block:
                        _run(self._models[number], unit, self._units.rows[unit], self._batch(unit, given))

    def _next_step(self) -> Step | None:
        """What the ranks of this replica do next; None when nobody generates any more. Only the first rank is asked."""
        while self._board is not None and self._others_generate(self._board):
            for model, pending in self._pending.items():
                taken = self._take_units(model, pending)
                if taken:
                    return model, tuple(taken)
            if not self._add_announced(self._board):
                count = len(self._layout.replicas)
                pause = max(count / ASKS_PER_SECOND, count * count / NOTES_PER_SECOND)
                time.sleep(pause)
                self._exchange.seconds += pause  # spent waiting, as in an exchange
                self._watch.wait(pause)
        return None

    def _others_generate(self, board: WorkQueue) -> bool:
        return board.others_generate()

    def _take_units(self, model: int, pending: list[int]) -> list[TakenUnit]:
        """Units for the model that no other replica runs: one for each of the model's blocks here, as far as they go.

        A unit whose responses the store does not give waits for the end, when whole rollouts are exchanged.
        """
        found: list[TakenUnit] = []
        assert self._board is not None, "the first rank of a replica"
        while pending and len(found) < len(self._blocks(self._models[model])):
            unit = pending.pop(0)
            wanted = self._models[model].ahead.units.rows[unit]
            if not wanted or not self._board.take(model, unit):
                continue
            responses = None if unit in self._own_numbers else self._board.responses(unit)
            if unit in self._own_numbers or responses is not None:
                found.append((unit, responses))
        return found

    def _add_announced(self, board: WorkQueue) -> bool:
        """Add units that other replicas have announced; whether there were any."""
        found = board.announced()
        for pending in self._pending.values():
            pending += found
        return bool(found)

    def _agreed(self, step: Step | None) -> Step | None:
        """The step of the replica's first rank, on all ranks of the replica: the step is collective."""
        if self._group is None:
            return step
        assert self._replica is not None, "a rank that generates"
        box, leader, started = [step], self._layout.replicas[self._replica][0], time.perf_counter()
        # by host memory: on a GPU a kernel of NCCL's would spin until the first rank has something
        dist.broadcast_object_list(box, src=leader, group=self._group, device=CPU)
        self._exchange.seconds += time.perf_counter() - started if self._rank != leader else 0.0
        return box[0]

    def _batch(self, unit: int, responses: TokenLists | None) -> RolloutBatch:
        """The rows of a unit, alike in all that a model sees, whoever has generated them."""
        if responses is None:
            return self._own.select(self._places[unit])
        of_rows = torch.arange(len(self._samples)).repeat_interleave(self._samples)
        counts = torch.bincount(of_rows[list(self._units.rows[unit])], minlength=len(self._samples))
        asked = counts.nonzero().flatten().tolist()
        return responses_to(self._prompts, asked, counts, [_without_log_probs(r) for r in responses])

    # ---- when it is whole

    def assign_rest(self, rollout: RolloutBatch) -> None:
        """Tell all ranks which units are scored, and deal out the rest. Of a rollout from disk nothing is scored."""
        if not self._begun:
            return
        sizes = [len(self._units)] * len(self._models) + ([len(self._prompts)] if self._calls is not None else [])
        if not sizes:
            return
        done = torch.zeros(sum(sizes), dtype=torch.int64, device=self._exchange.device)  # who + 1, or 0
        parts = done.split(sizes)
        for model, part in zip(self._models, parts, strict=False):
            if model.ahead.known and model.role.grid.cp_rank == 0:  # one tells of the ranks that share tokens
                part[list(model.ahead.known)] = model.role.grid.dp_rank + 1
        if self._calls is not None:
            parts[-1][list(self._calls.close())] = self._rank + 1
        owners = [(part - 1).tolist() for part in self._exchange.sum(done).cpu().split(sizes)]
        tokens = {units: tokens_of_units(rollout, units) for units in {model.ahead.units for model in self._models}}
        for model, own in zip(self._models, owners, strict=False):
            model.ahead.assign_rest(rollout, own, model.role.grid.dp, tokens[model.ahead.units])
        if self._calls is not None:
            self._calls.call_remaining(rollout, owners[-1])

    # ---- inside

    def _own_units(self) -> list[int]:
        assert self._replica is not None, "a rank that generates"
        return self._units.of_replica(self._replica)

    def _own_prompts(
        self, shares: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """(prompt, rows) that this rank calls the functions for: the replica's ranks take prompts in turn."""
        if self._replica is None:
            return []
        ranks, first = self._layout.replicas[self._replica], [0, *accumulate(samples)]
        own = shares[self._replica][ranks.index(self._rank) :: len(ranks)]
        return [(p, tuple(range(first[p], first[p + 1]))) for p in own]

    def _blocks(self, model: OverlappedModel) -> Sequence[Block]:
        """Those of the model on the ranks of this replica."""
        assert self._replica is not None, "a rank that generates"
        return model.blocks.get(self._replica, ())


def _by_row(wanted: Sequence[tuple[int, tuple[int, ...]]]) -> dict[int, _Unfinished]:
    found = [_Unfinished(number, rows, {}) for number, rows in wanted]
    return {row: each for each in found for row in each.rows}


def _run(model: OverlappedModel, unit: int, rows: Sequence[int], batch: RolloutBatch) -> None:
    """rows: those of `batch`, all of the unit, of which the model may be asked for some alone."""
    wanted = set(model.ahead.units.rows[unit])
    if len(wanted) < len(rows):
        batch = batch.select(torch.tensor([place for place, row in enumerate(rows) if row in wanted]))
    with model.role.computing_all_rows():
        result = model.results(batch)
    if model.role.grid.contributes:
        model.ahead.keep(unit, result)


def _places_within(units: ScoringUnits, some: list[int]) -> dict[int, Tensor]:
    """The rows of each of these units, all of one replica, by their places among the rows of that replica."""
    rows = sorted(row for unit in some for row in units.rows[unit])
    places = {row: place for place, row in enumerate(rows)}
    return {unit: torch.tensor([places[row] for row in units.rows[unit]], dtype=torch.int64) for unit in some}


def _without_log_probs(token_ids: Sequence[int]) -> RolloutRow:
    """No model looks at the engine's log-probs, nor at why a response ended."""
    return RolloutRow(list(token_ids), [0.0] * len(token_ids))
