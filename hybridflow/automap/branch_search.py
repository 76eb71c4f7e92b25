"""Branch and bound: which options of the roles of a placement go together, fastest first, within the memory. Pure.

A choice of an option for each role takes, of an iteration,

    sum of what all ranks wait for + generating + max over ranks of scoring + max over ranks of updating     (seconds)

or, where the engine generates beside the models, the longer of generating and of the last two. This is
what `timing.predict` has but for exchanges, saves and part of the reshard, which it leaves out: a lower bound.
A rank holds,
while models train, what the roles hold and the largest of their activations; while the engine generates, what rests and
the engine. Ranks alike are one cell. Roles get their options one after another; a branch is left where the seconds so
far, and the least of each role to come, are no less than the best so many that are known, or where the memory so far,
and the least of each role to come, is more than there is. The least of the roles to come is also taken together: the
fastest options of these that the memory of a cell still holds, see `frontier`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridflow.automap.choices import SIZED, Best, Choice, Counts, key_of
from hybridflow.automap.cost_tables import Chosen, CostTable, CostTables, SecondsToCome, Sums, least_of, zeros
from hybridflow.automap.engine_memory import EngineMemory
from hybridflow.automap.engine_options import EngineOption
from hybridflow.automap.frontier import Frontier
from hybridflow.automap.options import Options
from hybridflow.automap.placements import Placement
from hybridflow.automap.rank_classes import Float, Int, within
from hybridflow.config.auto import ENGINE

SLACK = 1e-9  # of the bound: sums in another order round otherwise


@dataclass(frozen=True)
class _Branch:
    """What is chosen so far, what that takes, and the seconds and bytes that it takes at least with what is to come."""

    chosen: Chosen
    sums: Sums
    seconds: float
    bytes: int


class BranchSearch:
    """All choices on one placement."""

    def __init__(self, options: Options, placement: Placement, budget: int, engines: EngineMemory) -> None:
        self._options, self._placement, self._budget = options, placement, budget
        self._of = CostTables(options, placement, engines)
        # the critic after the engine, which says whether it scores early
        first = [name for name in SIZED if name in placement]
        self._names = [*first, *(name for name in placement if name not in first)]

    @cached_property
    def bound(self) -> float:
        """Seconds that no choice is below, whatever the memory; infinite where a role has no option."""
        return self._bound(self._options.least)

    @cached_property
    def floor(self) -> float:
        """What `bound` is not below, found without looking at any role's options."""
        return self._bound(self._options.floor)

    def _bound(self, of: Callable[[str, int], tuple[float, float, float] | None]) -> float:
        least = {}
        for name, ranks in self._placement.items():
            found = of(name, len(ranks))
            if found is None:
                return float("inf")
            least[name] = found
        # the roles that lie on the same ranks
        sums = [
            [least[other] for other, others in self._placement.items() if within(ranks, others)]
            for ranks in dict.fromkeys(self._placement.values())
        ]
        scoring, updating = (max(sum(each[kind] for each in together) for together in sums) for kind in (1, 2))
        waits = {name: each[0] for name, each in least.items()}
        generating = waits.pop(ENGINE, 0.0)
        if self._options.config.generates_beside:
            return sum(waits.values()) + max(generating, scoring + updating)
        return sum(waits.values()) + generating + scoring + updating

    def search(self, best: Best, counts: Counts, *, exhaustive: bool, until: float) -> bool:
        """Adds to `best`; whether the search ended before `until`, a time of `time.monotonic`.

        exhaustive: memory alone ends a branch.
        """
        if self.bound == float("inf"):
            return True
        nothing = zeros(self._of.cells.count)
        levels, left = [self._of.table(name) for name in self._names], [nothing]
        for level in reversed(levels):
            left.append(left[-1].plus(least_of(level)))
        self._levels, self._left, self._frontiers = levels, left[::-1], self._frontiers_of(levels)
        self._best, self._counts, self._exhaustive, self._until = best, counts, exhaustive, until
        ended = self._descend(0, nothing, {})
        self._levels, self._left, self._frontiers = [], [], []  # large, and there are many placements
        return ended

    def _frontiers_of(self, levels: Sequence[CostTable]) -> list[list[SecondsToCome]]:
        """By depth: of the levels from there on, on some cells."""
        cells = sorted({cell for ranks in self._placement.values() for cell in self._of.cells.ends(ranks)})
        found = [[SecondsToCome(cell, Frontier.nothing(), Frontier.nothing()) for cell in cells]]
        for level in reversed(levels):
            found.append([ahead.plus(level) for ahead in found[-1]])
        return found[::-1]

    def _descend(self, depth: int, sums: Sums, chosen: Chosen) -> bool:
        """Through the options of the role at this depth, the most promising first; False: it is too late."""
        if time.monotonic() > self._until:
            return False
        level = self._of.beside(self._levels[depth], chosen)
        here = sums.plus(level)
        seconds, needed = self._bounds(depth, here)
        fits = (needed <= self._budget) & np.isfinite(seconds)
        self._counts.branches += len(level.options)
        self._counts.tight += int((~fits).sum())
        for i in np.argsort(seconds, kind="stable"):
            if self._is_slow(float(seconds[i])):
                break
            if not fits[i]:
                continue
            now = {**chosen, level.name: level.options[i]}
            branch = _Branch(now, here.option(int(i)), float(seconds[i]), int(needed[i]))
            if self._is_known(branch):
                continue
            found = self._with_engine(depth, sums, branch) if level.name == ENGINE else branch
            if found is None:
                continue
            if depth + 1 == len(self._levels):
                self._add(found)
            elif not self._descend(depth + 1, found.sums, found.chosen):
                return False
        return True

    def _bounds(self, depth: int, here: Sums) -> tuple[Float, Int]:
        """Of each option at this depth: seconds and bytes of the fullest rank, at least, with what is to come."""
        whole = here.plus(self._left[depth + 1])
        seconds = whole.seconds
        for ahead in self._frontiers[depth + 1]:
            seconds = np.maximum(seconds, ahead.bound(here, self._budget))
        return seconds, whole.most_bytes

    def _is_slow(self, seconds: float) -> bool:
        return not self._exhaustive and seconds >= self._best.limit * (1 - SLACK)

    def _is_known(self, branch: _Branch) -> bool:
        """Whether all that tells choices apart is chosen, and a choice like it is known that is as fast."""
        if self._exhaustive or any(name in self._placement and name not in branch.chosen for name in SIZED):
            return False
        return branch.seconds >= self._best.known(key_of(self._placement, branch.chosen)) * (1 - SLACK)

    def _with_engine(self, depth: int, sums: Sums, branch: _Branch) -> _Branch | None:
        """With what the engine takes on the chosen actor. sums: without it. None: it does not go, or is too slow."""
        beside = self._of.engine_beside(branch.chosen)
        if beside is None:
            return None
        after = replace(branch.sums, resting=sums.resting).plus(beside)
        whole = after.plus(self._left[depth + 1])
        seconds, needed = max(branch.seconds, float(whole.seconds)), int(whole.most_bytes)
        self._counts.tight += needed > self._budget
        if needed > self._budget or self._is_slow(seconds):
            return None
        return _Branch(branch.chosen, after, seconds, needed)

    def _add(self, branch: _Branch) -> None:
        """Unless communicators that roles do not share are too much."""
        if self._options.cuda and len(self._placement) > 1:
            needed = int(branch.sums.plus(self._of.more_links(branch.chosen)).most_bytes)
            self._counts.tight += needed > self._budget
            branch = replace(branch, bytes=needed)
        if branch.bytes <= self._budget:
            self._best.add(self._choice(branch))

    def _choice(self, branch: _Branch) -> Choice:
        roles = {name: branch.chosen[name] for name in self._placement if name != ENGINE}
        engine = branch.chosen.get(ENGINE)
        assert engine is None or isinstance(engine, EngineOption), "the engine's options"
        return Choice(self._placement, roles, engine, branch.seconds, branch.bytes)  # type: ignore[arg-type]  # all others are roles
