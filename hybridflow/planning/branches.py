"""Branch and bound: which options of the roles of a placement go together, fastest first, within the memory. Pure.

A choice of an option for each role takes, of an iteration,

    sum of what all ranks wait for + generating + max over ranks of scoring + max over ranks of updating     (seconds)

which is what `timing.predict` has but for exchanges, saves and part of the reshard, which it leaves out: a lower bound.
A rank holds,
while models train, what its roles hold and the largest of their activations; while the engine generates, what rests and
the engine. Ranks alike are one cell. Roles get their options one after another; a branch is left where the seconds so
far, and the least of each role to come, are no less than the best so many that are known, or where the memory so far,
and the least of each role to come, is more than there is. The least of the roles to come is also taken together: the
fastest options of these that the memory of a cell still holds, see `frontier`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridflow.auto_values import ENGINE
from hybridflow.planning.cells import Cells, Float, Int, contiguous, within
from hybridflow.planning.engine_memory import EngineMemory
from hybridflow.planning.engine_options import EngineOption
from hybridflow.planning.frontier import Frontier
from hybridflow.planning.options import Options, RoleOption
from hybridflow.planning.placements import Placement
from hybridflow.planning.waiting import blocks_within
from hybridflow.reshard.groups import rollout_layout, standalone_layout

SLACK = 1e-9  # of the bound: sums in another order round otherwise
# of a reference that becomes the actor, and of that
SAME = (
    *("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
)
TOLD = ("actor", ENGINE, "critic", "reward_model")  # of which other sizes make another choice
Key = tuple[object, ...]


@dataclass(frozen=True)
class Choice:
    """An option for every role, on a placement. seconds: the bound. bytes: no less than of the fullest rank."""

    placement: Placement
    roles: Mapping[str, RoleOption]
    engine: EngineOption | None  # None: of a run on fixed data
    seconds: float
    bytes: int

    @property
    def key(self) -> Key:
        engine = {} if self.engine is None else {ENGINE: self.engine}
        return key_of(self.placement, {**self.roles, **engine})


def key_of(placement: Placement, chosen: Mapping[str, RoleOption | EngineOption]) -> Key:
    """In what two choices have to differ to be told apart: where roles lie, and the sizes of the largest of them."""
    return (*placement.values(), *(chosen[name].sizes for name in TOLD if name in chosen))


class Best:
    """The `most` fastest choices that are known, each of another key. first: the first that is found will do."""

    def __init__(self, most: int, *, first: bool = False) -> None:
        self.most, self._first = most, first
        self._found: dict[Key, Choice] = {}
        self.limit = float("inf")  # what is no faster is of no interest

    def add(self, choice: Choice) -> None:
        known = self._found.get(choice.key)
        if choice.seconds >= self.limit or (known is not None and known.seconds <= choice.seconds):
            return
        self._found[choice.key] = choice
        if len(self._found) > self.most:
            del self._found[max(self._found, key=lambda key: self._found[key].seconds)]
        if self._first:
            self.limit = -float("inf")
        elif len(self._found) == self.most:
            self.limit = max(choice.seconds for choice in self._found.values())

    def known(self, key: Key) -> float:
        """Seconds of the choice with this key."""
        found = self._found.get(key)
        return self.limit if found is None else min(found.seconds, self.limit)

    def sorted(self) -> list[Choice]:
        return sorted(self._found.values(), key=lambda choice: (choice.seconds, str(choice.key)))


@dataclass
class Counts:
    """What a search has looked at."""

    branches: int = 0
    tight: int = 0  # that do not fit


# ------------------------------------------------------------------------------------------------ one placement


@dataclass
class _Level:
    """A role with all its options: arrays of (options,) or (options, cells)."""

    name: str
    options: Sequence[RoleOption | EngineOption]
    alone: Float
    scoring: Float
    updating: Float
    held: Int
    activations: Int
    resting: Int


@dataclass(frozen=True)
class _Sums:
    """Of what is chosen so far; arrays of (cells,), or of (options, cells)."""

    alone: Float
    scoring: Float
    updating: Float
    held: Int
    activations: Int
    resting: Int

    def at(self, i: int) -> "_Sums":
        return _Sums(*(np.asarray(getattr(self, name)[i]) for name in self.__dataclass_fields__))

    def plus(self, level: "_Level | _Sums") -> "_Sums":
        return _Sums(
            self.alone + level.alone,
            self.scoring + level.scoring,
            self.updating + level.updating,
            self.held + level.held,
            np.maximum(self.activations, level.activations),
            self.resting + level.resting,
        )

    @property
    def seconds(self) -> Float:
        found: Float = self.alone + self.scoring.max(axis=-1) + self.updating.max(axis=-1)
        return found

    @property
    def most_bytes(self) -> Int:
        """Of the fullest cell in its fullest moment."""
        found: Int = np.maximum(self.held + self.activations, self.resting).max(axis=-1)
        return found


@dataclass(frozen=True)
class _Ahead:
    """Of one cell: the least seconds of the roles to come, by the memory that is left while models train, and while
    the engine generates."""

    cell: int
    training: Frontier
    generating: Frontier

    def plus(self, level: _Level) -> "_Ahead":
        seconds = level.alone + level.scoring[:, self.cell] + level.updating[:, self.cell]
        held, resting = level.held[:, self.cell], level.resting[:, self.cell]
        return _Ahead(self.cell, self.training.plus(held, seconds), self.generating.plus(resting, seconds))

    def bound(self, here: _Sums, budget: int) -> Float:
        """Seconds of this cell, for each option; infinite where it cannot hold what is to come."""
        of_cell = {name: getattr(here, name)[:, self.cell] for name in here.__dataclass_fields__ if name != "alone"}
        training = self.training.within(budget - of_cell["held"] - of_cell["activations"])
        generating = self.generating.within(budget - of_cell["resting"])
        found: Float = here.alone + of_cell["scoring"] + of_cell["updating"] + np.maximum(training, generating)
        return found


class Branches:
    """All choices on one placement."""

    def __init__(self, options: Options, placement: Placement, budget: int, engines: EngineMemory) -> None:
        self._options, self._placement, self._budget, self._engines = options, placement, budget, engines
        # the critic after the engine, which says whether it scores early
        first = [name for name in TOLD if name in placement]
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
        return sum(each[0] for each in least.values()) + scoring + updating

    def search(self, best: Best, counts: Counts, *, exhaustive: bool, until: float) -> bool:
        """Adds to `best`; whether it came to its end before `until`, a time of `time.monotonic`.

        exhaustive: leave a branch for its memory alone.
        """
        if self.bound == float("inf"):
            return True
        levels = [self._level(name) for name in self._names]
        left = [_zeros(self._cells.count)]
        for level in reversed(levels):
            left.append(left[-1].plus(_least(level)))
        self._levels, self._left, self._frontiers = levels, left[::-1], self._frontiers_of(levels)
        self._best, self._counts, self._exhaustive, self._until = best, counts, exhaustive, until
        ended = self._descend(0, _zeros(self._cells.count), {})
        self._levels, self._left, self._frontiers = [], [], []  # large, and there are many placements
        return ended

    def _frontiers_of(self, levels: Sequence[_Level]) -> list[list[_Ahead]]:
        """By depth: of the levels from there on, on some cells."""
        cells = sorted({cell for ranks in self._placement.values() for cell in self._cells.ends(ranks)})
        found = [[_Ahead(cell, Frontier.nothing(), Frontier.nothing()) for cell in cells]]
        for level in reversed(levels):
            found.append([ahead.plus(level) for ahead in found[-1]])
        return found[::-1]

    def _descend(self, depth: int, sums: _Sums, chosen: dict[str, RoleOption | EngineOption]) -> bool:
        if time.monotonic() > self._until:
            return False
        level = self._levels[depth]
        if level.name == "reference" and self._options.reference_follows:
            level = self._like_actor(level, chosen)
        if level.name not in ("actor", ENGINE):
            level = self._while_waiting(level, chosen)
        here = sums.plus(level)
        whole = here.plus(self._left[depth + 1])
        seconds, needed = whole.seconds, whole.most_bytes
        for ahead in self._frontiers[depth + 1]:
            seconds = np.maximum(seconds, ahead.bound(here, self._budget))
        self._counts.branches += len(level.options)
        fits = (needed <= self._budget) & np.isfinite(seconds)
        self._counts.tight += int((~fits).sum())
        for i in np.argsort(seconds, kind="stable"):
            if not fits[i]:
                continue
            if not self._exhaustive and seconds[i] >= self._best.limit * (1 - SLACK):
                break
            now, after = {**chosen, level.name: level.options[i]}, here.at(int(i))
            if not self._exhaustive and self._is_known(now, float(seconds[i])):
                continue
            if level.name == ENGINE:
                beside = self._engine_beside(now)
                if beside is None:
                    continue
                after = replace(after, resting=sums.resting).plus(beside)
                whole_of_it = after.plus(self._left[depth + 1])
                needed[i], seconds[i] = whole_of_it.most_bytes, max(seconds[i], whole_of_it.seconds)
                if needed[i] > self._budget:
                    self._counts.tight += 1
                    continue
                if not self._exhaustive and seconds[i] >= self._best.limit * (1 - SLACK):
                    continue
            if depth + 1 == len(self._levels):
                self._best.add(self._choice(now, float(seconds[i]), int(needed[i])))
            elif not self._descend(depth + 1, after, now):
                return False
        return True

    def _is_known(self, chosen: dict[str, RoleOption | EngineOption], seconds: float) -> bool:
        """Whether all that tells choices apart is chosen, and a choice like it is known that is as fast."""
        if any(name in self._placement and name not in chosen for name in TOLD):
            return False
        return seconds >= self._best.known(key_of(self._placement, chosen)) * (1 - SLACK)

    def _choice(self, chosen: dict[str, RoleOption | EngineOption], seconds: float, needed: int) -> Choice:
        roles = {name: chosen[name] for name in self._placement if name != ENGINE}
        engine = chosen.get(ENGINE)
        assert engine is None or isinstance(engine, EngineOption), "the engine's options"
        return Choice(self._placement, roles, engine, seconds, needed)  # type: ignore[arg-type]  # all others are roles

    # ---------------------------------------------------------------------------------------- levels

    @cached_property
    def _cells(self) -> Cells:
        stages = {
            name: {option.layout.pp for option in self._options.of_role(name, len(ranks))}
            for name, ranks in self._placement.items()
            if name != ENGINE
        }
        return Cells(self._placement, stages)

    def _level(self, name: str) -> _Level:
        count = len(self._placement[name])
        return self._engine_level(count) if name == ENGINE else self._role_level(name, count)

    def _role_level(self, name: str, count: int) -> _Level:
        options = self._options.of_role(name, count)
        spread = self._cells.spread
        there = spread(name, [1])

        def of(attribute: str) -> Int:
            rows = [spread(name, getattr(option, attribute)) for option in options]
            return np.array(rows, dtype=np.int64).reshape(len(options), self._cells.count)

        def seconds(attribute: str) -> Float:
            return np.outer([getattr(option, attribute) for option in options], there).astype(np.float64)

        alone = np.array([option.alone for option in options], dtype=np.float64)
        return _Level(
            name,
            options,
            alone,
            seconds("scoring"),
            seconds("updating"),
            of("held"),
            of("activations"),
            of("resting"),
        )

    def _engine_level(self, count: int) -> _Level:
        """With the least that each holds on any of the actor's layouts: of what the actor has, nothing twice."""
        options = self._options.of_engine(count)
        shape = len(options), self._cells.count
        there = self._cells.spread(ENGINE, [1]).astype(np.int64)
        resting = np.array([self._engines.least(option) * there for option in options], dtype=np.int64).reshape(shape)
        none, no_bytes = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        held = np.array([self._engines.awake(option) * there for option in options], dtype=np.int64).reshape(shape)
        generating = np.array([option.generating for option in options], dtype=np.float64)
        return _Level(ENGINE, options, generating, none, none, held, no_bytes, resting)

    def _engine_beside(self, chosen: Mapping[str, RoleOption | EngineOption]) -> _Sums | None:
        """What the engine takes on the chosen actor beyond its level, and in the place of what that has of resting:
        seconds of the hand-off, at least, and those that the actor's scoring takes longer. None: it cannot lie so."""
        actor, option = chosen["actor"], chosen[ENGINE]
        assert isinstance(actor, RoleOption) and isinstance(option, EngineOption), "they are chosen"
        ranks, colocated = self._placement[ENGINE], self._placement[ENGINE] == self._placement["actor"]
        memory = self._engines.of(actor.layout, option, ranks, colocated=colocated)
        if memory is None:
            return None
        handed = self._engines.seconds(actor.layout, option, ranks, self._placement["actor"])
        more = self._more(actor, chosen) if self._options.may_wait("actor") else 0.0
        scoring = more * self._cells.spread("actor", [1.0])
        resting = self._cells.spread("actor" if colocated else ENGINE, memory).astype(np.int64)
        none = _zeros(self._cells.count)
        return replace(none, alone=np.asarray(handed), scoring=scoring.astype(np.float64), resting=resting)

    def _while_waiting(self, level: _Level, chosen: Mapping[str, RoleOption | EngineOption]) -> _Level:
        """With the seconds of options that score before the rollout is whole, as `planning.waiting` has it."""
        if not self._options.may_wait(level.name):
            return level
        early = {each.sizes: each for each in level.options if isinstance(each, RoleOption)}
        begins = {sizes: self._begins_early(each, chosen) for sizes, each in early.items()}
        of_role = [each for each in level.options if isinstance(each, RoleOption)]
        more = [each.early - each.scoring if begins[each.sizes] else 0.0 for each in of_role]
        there = self._cells.spread(level.name, [1])
        return replace(level, scoring=level.scoring + np.outer(more, there))

    def _more(self, option: RoleOption, chosen: Mapping[str, RoleOption | EngineOption]) -> float:
        """Seconds beyond those of scoring the whole rollout."""
        return option.early - option.scoring if self._begins_early(option, chosen) else 0.0

    def _begins_early(self, option: RoleOption, chosen: Mapping[str, RoleOption | EngineOption]) -> bool:
        """Whether some replica of the engine has a whole one of the role, and another replica is there to wait for."""
        actor, engine = chosen["actor"], chosen[ENGINE]
        assert isinstance(actor, RoleOption) and isinstance(engine, EngineOption), "they are chosen first"
        ranks, own = self._placement[ENGINE], self._placement[option.name]
        if len(ranks) == engine.tp * engine.pp:
            return False  # one replica
        colocated = ranks == self._placement["actor"]
        train = (actor.layout.tp, actor.layout.pp) if colocated else ()
        lie = (own[0] - ranks[0], len(own), len(ranks)) if contiguous(own) and contiguous(ranks) else (own, ranks)
        key: tuple[object, ...] = (lie, option.sizes, engine.sizes, train)
        if key not in self._engines.blocks:
            on_actor = replace(actor.layout, ranks=ranks) if colocated else None
            if on_actor is None:
                rollout = standalone_layout(ranks, engine.tp, engine.pp)
            else:
                rollout = rollout_layout(on_actor, engine.tp, engine.pp)
            self._engines.blocks[key] = bool(blocks_within(replace(option.layout, ranks=own), rollout))
        return self._engines.blocks[key]

    def _like_actor(self, level: _Level, chosen: Mapping[str, RoleOption | EngineOption]) -> _Level:
        """Infinite seconds where a reference that becomes the actor would not lie as that does."""
        actor = chosen["actor"]
        assert isinstance(actor, RoleOption), "the actor is no engine"
        unlike = [each.config for each in level.options if isinstance(each, RoleOption)]
        apart = [any(getattr(one, key) != getattr(actor.config, key) for key in SAME) for one in unlike]
        return replace(level, alone=np.where(apart, np.inf, level.alone))


def _zeros(count: int) -> _Sums:
    none, no_bytes = np.zeros(count), np.zeros(count, dtype=np.int64)
    return _Sums(np.zeros(()), none, none, no_bytes, no_bytes, no_bytes)


def _least(level: _Level) -> _Sums:
    """Of each number the least of any option."""
    return _Sums(
        level.alone.min(),
        level.scoring.min(axis=0),
        level.updating.min(axis=0),
        level.held.min(axis=0),
        level.activations.min(axis=0),
        level.resting.min(axis=0),
    )
