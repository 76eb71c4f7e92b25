"""What ranks do about a rollout before it is whole: score finished responses while other replicas still generate.

    ahead.begin(prompts, samples)                  # cut in units, before a token is generated
    generator.generate(..., beside=ahead)          # ahead.finished(row, response), ahead.waits(own rows)
    ahead.settle(rollout)                          # one exchange: who has done what; the rest is dealt out
    run.scores(rollout), reference.log_probs(rollout), ...

Users' functions are called in the background from the first prompt on whose responses are all there. A replica that has
no response left to wait for runs units of its own rows, model after model, until the last replica is done. Results
depend on the units alone, which follow from the prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.parallel.exchange import Contribution, Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.parallel.noticeboard import Noticeboard
from hybridflow.planning.waiting import Block
from hybridflow.recording.measure import Stopwatch
from hybridflow.rewards.background import Group
from hybridflow.rewards.scorer import PromptCalls, Scorer
from hybridflow.roles.ahead import Ahead, Units, cut_in_units
from hybridflow.roles.base import Role
from hybridflow.rollout.engine import Response
from hybridflow.rollout.generation import prompts_of_replicas

UNITS_PER_BLOCK = 4  # that the rows of a replica are cut in: one may be under way when the last response is there
PHASE = "scored_while_waiting"
FINISHED = "finished"  # replicas that have generated all, counted over the run


@dataclass(frozen=True)
class Waiting:
    """A model that computes ahead, how it is asked, and its blocks on the ranks of each engine replica."""

    role: Role
    results: Callable[[RolloutBatch], Contribution]
    blocks: Mapping[int, Sequence[Block]]

    @property
    def ahead(self) -> Ahead:
        assert self.role.ahead is not None, "nothing has begun"
        return self.role.ahead


class WhileWaiting:
    """Of this rank. Building it is collective over the world, and so are `begin` and `settle`.

    models: those of `planning.waiting.models_that_wait`, alike on all ranks. notices: None in a world of one replica.
    """

    def __init__(
        self,
        models: Sequence[Waiting],
        scorer: Scorer | None,
        layout: RolloutLayout,
        *,
        rank: int,
        groups: ProcessGroups,
        notices: Noticeboard | None,
        exchange: Exchange,
        watch: Stopwatch,
    ) -> None:
        self._models, self._scorer, self._layout, self._rank = tuple(models), scorer, layout, rank
        self._notices, self._exchange, self._watch = notices, exchange, watch
        shared = self._models and len(layout.replicas[0]) > 1
        self._group = groups.own(layout.replicas) if shared else None
        self._at = layout.coordinates(rank) if rank in layout else None
        blocks = max((ceil(model.role.grid.dp / len(layout.replicas)) for model in self._models), default=1)
        self._units_per_replica = UNITS_PER_BLOCK * blocks
        self._num_rollouts = 0
        self._calls: PromptCalls | None = None
        self._begun = False

    def begin(self, prompts: PromptBatch, samples: Sequence[int]) -> "WhileWaiting":
        """The next rollout has so many responses to each of these prompts."""
        shares = prompts_of_replicas(prompts, torch.tensor(samples), len(self._layout.replicas))
        self._units = cut_in_units(
            shares,
            samples,
            [int(length) * count for length, count in zip(prompts.lengths, samples, strict=True)],
            per_replica=self._units_per_replica,
        )
        for model in self._models:
            model.role.ahead = Ahead(self._units)
        self._calls = self._scorer.call_ahead(prompts) if self._scorer is not None else None
        self._num_prompts, self._begun = len(prompts), True
        self._missing = self._own_groups(shares, samples) if self._calls is not None else {}
        return self

    def forget(self) -> None:
        """What is generated next is scored when it is whole."""
        for model in self._models:
            model.role.ahead = None
        self._begun = False

    # ---- while it is generated

    def finished(self, row: int, response: Response) -> None:
        """See `Beside`. Calls the functions when it was the last response to its prompt."""
        group = self._missing.get(row)
        if group is None:
            return
        group.responses[row] = response.token_ids
        if len(group.responses) == len(group.rows):
            assert self._calls is not None, "there are groups only where functions are called"
            responses = tuple(group.responses[row] for row in group.rows)
            self._calls.calls.submit(Group(group.prompt, group.rows, responses))

    def waits(self, own: RolloutBatch) -> None:
        """See `Beside`. Run units of this replica's rows, one after the other, until the last replica is done."""
        if not self._models:
            return
        assert self._at is not None and self._notices is not None, "who waits has generated, and is not the only one"
        self._num_rollouts += 1
        if self._leads:
            self._notices.add(FINISHED)
        units = self._units.of_replica(self._at.replica)
        places = _places_within(self._units, units)
        with self._watch.phase(PHASE):
            for model, some in self._steps(units):
                if not self._others_generate():
                    return
                for unit, block in zip(some, model.blocks[self._at.replica], strict=False):
                    if self._rank in block:
                        _run(model, unit, own.select(places[unit]))

    def _steps(self, units: list[int]) -> Iterator[tuple[Waiting, list[int]]]:
        """A model, and units that its blocks here run at a time. Alike on all ranks of an engine replica."""
        assert self._at is not None, "a rank that generates"
        for model in self._models:
            num_blocks = len(model.blocks.get(self._at.replica, ()))
            for first in range(0, len(units), num_blocks) if num_blocks else ():
                yield model, units[first : first + num_blocks]

    def _others_generate(self) -> bool:
        """Asked by all ranks of a replica at the same point, which get the same answer: what follows is collective."""
        answer = torch.zeros(1, dtype=torch.int64, device=self._exchange.device)
        if self._leads:
            assert self._notices is not None, "there are other replicas"
            count = self._notices.add(FINISHED, 0)  # None: the store is gone, and with it the run
            answer += count is not None and count < self._num_rollouts * len(self._layout.replicas)
        if self._group is not None:
            assert self._at is not None, "a rank that generates"
            dist.broadcast(answer, src=self._layout.replicas[self._at.replica][0], group=self._group)
        return bool(answer)

    # ---- when it is whole

    def settle(self, rollout: RolloutBatch) -> None:
        """Who has done what, and who does the rest. Also of a rollout that was kept: then nobody has done anything."""
        if not self._begun:
            return
        sizes = [len(self._units)] * len(self._models) + ([self._num_prompts] if self._calls is not None else [])
        if not sizes:
            return
        done = torch.zeros(sum(sizes), dtype=torch.int64, device=self._exchange.device)  # who + 1, or 0
        parts = done.split(sizes)
        for model, part in zip(self._models, parts, strict=False):
            if model.ahead.known:
                part[list(model.ahead.known)] = model.role.grid.dp_rank + 1
        if self._calls is not None:
            parts[-1][list(self._calls.calls.close())] = self._rank + 1
        owners = [(part - 1).tolist() for part in self._exchange.summed(done).cpu().split(sizes)]
        for model, own in zip(self._models, owners, strict=False):
            model.ahead.settle(rollout, own, model.role.grid.dp)
        if self._models:
            self._watch.seconds.setdefault(PHASE, 0.0)
        if self._calls is not None:
            self._calls.settle(rollout, owners[-1])

    # ---- inside

    def _own_groups(self, shares: Sequence[Sequence[int]], samples: Sequence[int]) -> dict[int, "_Unfinished"]:
        """By row, of the prompts that this rank calls the functions for: those of its replica in turn."""
        if self._at is None:
            return {}
        ranks = self._layout.replicas[self._at.replica]
        first = [0, *accumulate(samples)]
        own = shares[self._at.replica][ranks.index(self._rank) :: len(ranks)]
        groups = [_Unfinished(p, tuple(range(first[p], first[p + 1])), {}) for p in own]
        return {row: group for group in groups for row in group.rows}

    @property
    def _leads(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self._layout.contributes(self._rank)


@dataclass(frozen=True)
class _Unfinished:
    """The responses to a prompt, as far as they are there, by row."""

    prompt: int
    rows: tuple[int, ...]
    responses: dict[int, list[int]]


def _run(model: Waiting, unit: int, batch: RolloutBatch) -> None:
    with model.role.alone():
        result = model.results(batch)
    if model.role.grid.contributes:
        model.ahead.keep(unit, result)


def _places_within(units: Units, some: list[int]) -> dict[int, Tensor]:
    """The rows of each of these units, all of one replica, by their places among the rows of that replica."""
    rows = sorted(row for unit in some for row in units.rows[unit])
    places = {row: place for place, row in enumerate(rows)}
    return {unit: torch.tensor([places[row] for row in units.rows[unit]], dtype=torch.int64) for unit in some}
