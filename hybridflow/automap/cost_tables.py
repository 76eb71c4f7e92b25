"""The options of a role as arrays over the cells of a placement: seconds and bytes, and what becomes of them. Pure.

    levels = CostTables(options, placement, engines)
    level = levels.table("critic")                        each option's seconds and bytes, whatever others are chosen
    level = levels.beside(level, chosen)               beside what the roles before it have chosen
    levels.engine_beside(chosen)                       what an engine takes on the chosen actor beyond the level

A cell is of ranks that have the same roles in the same stages, see `cells`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridflow.automap.engine_memory import EngineMemory
from hybridflow.automap.engine_options import EngineOption
from hybridflow.automap.frontier import Frontier
from hybridflow.automap.options import Options, RoleOption
from hybridflow.automap.placements import Placement
from hybridflow.automap.rank_classes import Float, Int, RankClasses, contiguous
from hybridflow.config.auto import ENGINE
from hybridflow.placement.margin import bytes_by_rank, role_bytes
from hybridflow.placement.overlapped_scoring import blocks_within
from hybridflow.placement.placed import PlacedModel, head_of
from hybridflow.reshard.groups import rollout_layout, standalone_layout

# of a reference that becomes the actor, and of that
SAME = (
    *("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("context_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"),
)
Chosen = Mapping[str, RoleOption | EngineOption]


@dataclass(frozen=True)
class Sums:
    """Of what is chosen so far; arrays of (cells,), or of (options, cells); alone and beside of (), or of (options,).

    alone: seconds in which all ranks wait. beside: of an engine that generates while the models score and update.
    """

    alone: Float
    beside: Float
    scoring: Float
    updating: Float
    held: Int
    activations: Int
    resting: Int

    def option(self, i: int) -> "Sums":
        return Sums(*(np.asarray(getattr(self, name)[i]) for name in self.__dataclass_fields__))

    def plus(self, other: "Sums") -> "Sums":
        return Sums(
            self.alone + other.alone,
            self.beside + other.beside,
            self.scoring + other.scoring,
            self.updating + other.updating,
            held=self.held + other.held,
            activations=np.maximum(self.activations, other.activations),
            resting=self.resting + other.resting,
        )

    @property
    def seconds(self) -> Float:
        found: Float = self.alone + np.maximum(self.beside, self.scoring.max(axis=-1) + self.updating.max(axis=-1))
        return found

    @property
    def most_bytes(self) -> Int:
        """Of the fullest cell in the fullest moment."""
        found: Int = np.maximum(self.held + self.activations, self.resting).max(axis=-1)
        return found


@dataclass(frozen=True)
class CostTable(Sums):
    """A role with all options, and what each of these adds: arrays of (options,) or (options, cells)."""

    name: str
    options: Sequence[RoleOption | EngineOption]


@dataclass(frozen=True)
class SecondsToCome:
    """Of one cell: the least seconds of the roles to come, by the memory that is left while models train, and while
    the engine generates."""

    cell: int
    training: Frontier
    generating: Frontier

    def plus(self, level: CostTable) -> "SecondsToCome":
        seconds = level.alone + level.scoring[:, self.cell] + level.updating[:, self.cell]
        held, resting = level.held[:, self.cell], level.resting[:, self.cell]
        return SecondsToCome(self.cell, self.training.plus(held, seconds), self.generating.plus(resting, seconds))

    def bound(self, here: Sums, budget: int) -> Float:
        """Seconds of this cell, for each option; infinite where it cannot hold what is to come."""
        by_cell = ("scoring", "updating", "held", "activations", "resting")
        of_cell = {name: getattr(here, name)[:, self.cell] for name in by_cell}
        training = self.training.within(budget - of_cell["held"] - of_cell["activations"])
        generating = self.generating.within(budget - of_cell["resting"])
        found: Float = here.alone + of_cell["scoring"] + of_cell["updating"] + np.maximum(training, generating)
        return found


def zeros(count: int) -> Sums:
    none, no_bytes = np.zeros(count), np.zeros(count, dtype=np.int64)
    return Sums(np.zeros(()), np.zeros(()), none, none, held=no_bytes, activations=no_bytes, resting=no_bytes)


def least_of(level: CostTable) -> Sums:
    """Of each number the least of any option."""
    return Sums(
        level.alone.min(),
        level.beside.min(),
        level.scoring.min(axis=0),
        level.updating.min(axis=0),
        held=level.held.min(axis=0),
        activations=level.activations.min(axis=0),
        resting=level.resting.min(axis=0),
    )


class CostTables:
    """Of one placement."""

    def __init__(self, options: Options, placement: Placement, engines: EngineMemory) -> None:
        self._options, self._placement, self._engines = options, placement, engines
        self._more_links: dict[tuple[object, ...], Sums] = {}

    def beside(self, level: CostTable, chosen: Chosen) -> CostTable:
        """The level of a role that comes after these."""
        if level.name == "reference" and self._options.config.algorithm.kl.resets:
            level = self._like_actor(level, chosen)
        return level if level.name in ("actor", ENGINE) else self._while_waiting(level, chosen)

    @cached_property
    def cells(self) -> RankClasses:
        stages = {
            name: {option.layout.pp for option in self._options.of_role(name, len(ranks))}
            for name, ranks in self._placement.items()
            if name != ENGINE
        }
        return RankClasses(self._placement, stages)

    def table(self, name: str) -> CostTable:
        count = len(self._placement[name])
        return self._engine_level(count) if name == ENGINE else self._role_level(name, count)

    def _role_level(self, name: str, count: int) -> CostTable:
        options = self._options.of_role(name, count)
        spread = self.cells.spread
        there = spread(name, [1])

        def by_cell(attribute: str) -> Int:
            rows = [spread(name, getattr(option, attribute)) for option in options]
            return np.array(rows, dtype=np.int64).reshape(len(options), self.cells.count)

        def seconds(attribute: str) -> Float:
            return np.outer([getattr(option, attribute) for option in options], there).astype(np.float64)

        alone = np.array([option.alone for option in options], dtype=np.float64)
        return CostTable(
            alone,
            np.zeros(len(options)),
            seconds("scoring"),
            seconds("updating"),
            held=by_cell("held"),
            activations=by_cell("activations"),
            resting=by_cell("resting"),
            name=name,
            options=options,
        )

    def _engine_level(self, count: int) -> CostTable:
        """With the least that each holds on any of the actor's layouts: of what the actor has, nothing twice."""
        options = self._options.of_engine(count)
        shape = len(options), self.cells.count
        there = self.cells.spread(ENGINE, [1]).astype(np.int64)
        resting = np.array([self._engines.least(option) * there for option in options], dtype=np.int64).reshape(shape)
        none, no_bytes = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        held = np.array([self._engines.awake(option) * there for option in options], dtype=np.int64).reshape(shape)
        generating = np.array([option.generating for option in options], dtype=np.float64)
        alone, beside = generating, np.zeros(len(options))
        if self._options.config.generates_beside:
            alone, beside = beside, alone
        of_bytes = {"held": held, "activations": no_bytes, "resting": resting}
        return CostTable(alone, beside, none, none, **of_bytes, name=ENGINE, options=options)

    def engine_beside(self, chosen: Chosen) -> Sums | None:
        """What the engine takes on the chosen actor beyond the level, and in the place of what that has of resting:
        seconds of the hand-off, at least, and those that the actor's scoring takes longer. None: it cannot lie so."""
        actor, option = chosen["actor"], chosen[ENGINE]
        assert isinstance(actor, RoleOption) and isinstance(option, EngineOption), "they are chosen"
        ranks, colocated = self._placement[ENGINE], self._placement[ENGINE] == self._placement["actor"]
        memory = self._engines.most_bytes(actor.layout, option, ranks, colocated=colocated)
        if memory is None:
            return None
        handed = self._engines.seconds(actor.layout, option, ranks, self._placement["actor"])
        more = self._more(actor, chosen) if self._options.may_wait("actor") else 0.0
        scoring = more * self.cells.spread("actor", [1.0])
        resting = self.cells.spread("actor" if colocated else ENGINE, memory).astype(np.int64)
        none = zeros(self.cells.count)
        return replace(none, alone=np.asarray(handed), scoring=scoring.astype(np.float64), resting=resting)

    def more_links(self, chosen: Chosen) -> Sums:
        """Communicators of all roles together, beyond those of one, which the levels have."""
        roles = {name: option for name, option in chosen.items() if isinstance(option, RoleOption)}
        key = tuple(option.layout for option in roles.values())
        if key not in self._more_links:
            self._more_links[key] = self._find_links(roles)
        return self._more_links[key]

    def _find_links(self, roles: Mapping[str, RoleOption]) -> Sums:
        models = {
            name: PlacedModel(
                name,
                option.config,
                self._options.specs[name],
                replace(option.layout, ranks=self._placement[name]),
                head_of(name),
            )
            for name, option in roles.items()
        }
        of_ranks, cells = bytes_by_rank(models.values()), self.cells
        whole = np.array([of_ranks.get(cell * cells.size, 0) for cell in range(cells.count)], dtype=np.int64)
        own = {
            name: cells.spread(name, role_bytes(model, cuda=True)).astype(np.int64) for name, model in models.items()
        }
        most = np.maximum.reduce(list(own.values()))
        return replace(zeros(cells.count), held=whole - most, resting=whole - own.get("actor", 0))

    def _while_waiting(self, level: CostTable, chosen: Chosen) -> CostTable:
        """With the seconds of options that score before the rollout is whole, see `placement.overlapped_scoring`."""
        if not self._options.may_wait(level.name):
            return level
        of_role = [each for each in level.options if isinstance(each, RoleOption)]
        early = {each.sizes: each for each in of_role}
        begins = {sizes: self._begins_early(each, chosen) for sizes, each in early.items()}
        more = [each.early - each.scoring if begins[each.sizes] else 0.0 for each in of_role]
        there = self.cells.spread(level.name, [1])
        return replace(level, scoring=level.scoring + np.outer(more, there))

    def _more(self, option: RoleOption, chosen: Chosen) -> float:
        """Seconds beyond those of scoring the whole rollout."""
        return option.early - option.scoring if self._begins_early(option, chosen) else 0.0

    def _begins_early(self, option: RoleOption, chosen: Chosen) -> bool:
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

    def _like_actor(self, level: CostTable, chosen: Chosen) -> CostTable:
        """Infinite seconds where a reference that becomes the actor would not lie as that does."""
        actor = chosen["actor"]
        assert isinstance(actor, RoleOption), "the actor is no engine"
        unlike = [each.config for each in level.options if isinstance(each, RoleOption)]
        apart = [any(getattr(one, key) != getattr(actor.config, key) for key in SAME) for one in unlike]
        return replace(level, alone=np.where(apart, np.inf, level.alone))
