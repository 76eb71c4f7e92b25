"""Whether a placed run fits the memory of the devices, and which changes of keys make it fit. Pure.

    found = verdict(place(config, 8), 80 << 30)
    found.fits, found.alone, found.together    changes that suffice, each by itself, or all of them together

A change is tried: the config that has it is placed again, and the table of memory is asked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from hybridflow.config import TrainedRoleConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import UserError
from hybridflow.placement.cache_room import with_room
from hybridflow.placement.footprint import staged_bytes
from hybridflow.placement.forecast import Fullest, fullest
from hybridflow.placement.placed import PlacedModels, PlacedRun, place
from hybridflow.placement.recomputation import further

GIB = 1 << 30
MOST_TOLD = 3  # changes of which each alone suffices
MOST_DOUBLINGS, MOST_RANKS = 4, 2048  # of the ranks that are tried
MOST_TURNS = 6  # of changes, each with what is the fullest moment then
MOST_TENSOR_PARALLEL = 8  # GPUs of a host
Change = tuple[str, Any]  # key of the config, value


@dataclass(frozen=True)
class Verdict:
    """room: bytes for the table of memory and libraries. alone: each suffices. together: suffice together, else empty.

    ranks: the number on which the run fits with `together`, where that alone is not enough.
    """

    fullest: Fullest
    room: int
    alone: tuple[Change, ...] = ()
    together: tuple[Change, ...] = ()
    ranks: int | None = None

    @property
    def fits(self) -> bool:
        return self.fullest.needed <= self.room

    @property
    def left(self) -> int:
        """Bytes of the fullest rank; negative: that it lacks."""
        return self.room - self.fullest.needed


def verdict(run: PlacedModels, room: int) -> Verdict:
    run = with_room(run, room)
    found = Verdict(fullest(run), room)
    if found.fits:
        return found
    alone = _first_of_each(change for change in _changes(run, found) if _fits(run, (change,), room))
    if alone:
        return replace(found, alone=alone[:MOST_TOLD])
    layouts = [(), *_spread(run, found), *_wider(run, found)]
    for doublings in range(MOST_DOUBLINGS + 1):
        ranks = run.world_size << doublings
        for layout in layouts if not doublings or ranks <= MOST_RANKS else ():
            changes = _in_turn(run, layout, room, world_size=ranks)
            if changes is not None:
                needed = _needed(run, changes, room, world_size=ranks)
                needed = _least(run, needed, room, world_size=ranks)
                return replace(found, together=needed, ranks=ranks if doublings else None)
    return found


def _spread(run: PlacedModels, found: Verdict) -> Iterator[tuple[Change, ...]]:
    """The mixtures of the fullest rank with experts on twice as many ranks, four times, and so on."""
    models = [run.models[name] for name in found.fullest.roles if name in run.models]
    for doublings in range(1, MOST_DOUBLINGS + 1):
        changes: list[Change] = []
        for model in models:
            experts, size = model.spec.num_experts, model.config.expert_parallel_size << doublings
            if experts and experts % size == 0 and size <= len(model.layout.ranks):
                changes.append((f"{model.name}.expert_parallel_size", size))
                if model.config.tensor_parallel_size > 1:  # replicas that share experts need it
                    changes.append((f"{model.name}.sequence_parallel", True))
        if changes:
            yield tuple(changes)


def _wider(run: PlacedModels, found: Verdict) -> Iterator[tuple[Change, ...]]:
    """The roles of the fullest rank on twice as many tensor-parallel ranks, four times, and so on, within a host."""
    models = {name: run.models[name].config for name in found.fullest.roles if name in run.models}
    for doublings in range(1, MOST_DOUBLINGS + 1):
        sizes = {name: role.tensor_parallel_size << doublings for name, role in models.items()}
        if not sizes or max(sizes.values()) > MOST_TENSOR_PARALLEL:  # none: the engine is alone on the fullest rank
            return
        changes: list[Change] = []
        for name, size in sizes.items():
            changes += [(f"{name}.tensor_parallel_size", size), (f"{name}.sequence_parallel", True)]
        yield tuple(changes)


def _changes(run: PlacedModels, found: Verdict) -> Iterator[Change]:
    """What takes less in the fullest moment, what costs least time first."""
    if found.fullest.moment == "generation":
        yield from _of_generation(run, found)
        return
    models = {name: run.models[name].config for name in found.fullest.roles if name in run.models}
    trained = {name: role for name, role in models.items() if isinstance(role, TrainedRoleConfig)}
    for name, role in models.items():
        if role.tensor_parallel_size > 1 and not role.sequence_parallel:
            yield f"{name}.sequence_parallel", True
    longest = run.config.max_sequence_length
    for name, role in models.items():
        if role.micro_batch_tokens > longest:
            yield f"{name}.micro_batch_tokens", longest
    for name in trained if run.cuda else ():  # a CPU has one memory
        state = found.fullest.roles[name].optimizer
        if staged_bytes(state) < state:
            yield f"{name}.offload_optimizer", "always"
    steps = [(f"{name}.recompute", further(role.recompute, run.models[name].spec)) for name, role in trained.items()]
    for number in range(max((len(values) for _, values in steps), default=0)):
        yield from ((key, values[number]) for key, values in steps if number < len(values))


def _of_generation(run: PlacedModels, found: Verdict) -> Iterator[Change]:
    roles = found.fullest.roles
    for key, kind in (("offload_optimizer", "optimizer"), ("offload_gradients", "gradients")):
        for name, held in roles.items():
            if name in run.models and getattr(held, kind):
                yield f"{name}.{key}", True
    engine = roles.get("engine")
    if engine is None or not isinstance(run, PlacedRun) or not run.kv_cache.is_given:
        return
    # the stages of an engine have parts of what the key says
    share = engine.kv_cache / run.kv_cache.whole
    size = max(run.kv_cache.whole + found.left / share, run.kv_cache.least)
    gib = floor(100 * size / GIB) / 100
    if gib * GIB >= run.kv_cache.least:
        yield "rollout.kv_cache_gib", gib


def _in_turn(run: PlacedModels, layout: Sequence[Change], room: int, *, world_size: int) -> tuple[Change, ...] | None:
    """The layout with the changes of the fullest moment, then of the one that is the fullest after them; None: it does
    not fit with all of them."""
    changes = dict(layout)
    for _ in range(MOST_TURNS):
        after = changed(run, tuple(changes.items()), room, world_size=world_size)
        if after is None:
            return None
        found = Verdict(fullest(after), room)
        more = dict(_changes(after, found))
        if found.fits or not more:
            return tuple(changes.items()) if found.fits else None
        changes |= more
    return None


def _needed(run: PlacedModels, changes: Sequence[Change], room: int, *, world_size: int) -> tuple[Change, ...]:
    """Without those that the others suffice without, the costliest left out first."""
    kept = tuple(changes)
    for change in reversed(changes):
        fewer = tuple(each for each in kept if each != change)
        if _fits(run, fewer, room, world_size=world_size):
            kept = fewer
    return kept


def _least(run: PlacedModels, changes: Sequence[Change], room: int, *, world_size: int) -> tuple[Change, ...]:
    """With as little computed again as is enough."""
    kept = dict(changes)
    for key in [key for key in kept if key.endswith(".recompute")]:
        model = run.models[key.removesuffix(".recompute")]
        assert isinstance(model.config, TrainedRoleConfig), "others compute nothing again"
        for value in further(model.config.recompute, model.spec):
            if _fits(run, tuple((kept | {key: value}).items()), room, world_size=world_size):
                kept[key] = value
                break
    return tuple(kept.items())


def _first_of_each(changes: Iterable[Change]) -> tuple[Change, ...]:
    """One of each key."""
    found: dict[str, Any] = {}
    for key, value in changes:
        found.setdefault(key, value)
    return tuple(found.items())


def _fits(run: PlacedModels, changes: Sequence[Change], room: int, *, world_size: int | None = None) -> bool:
    after = changed(run, changes, room, world_size=world_size)
    return after is not None and fullest(after).needed <= room


def changed(
    run: PlacedModels, changes: Sequence[Change], room: int, *, world_size: int | None = None
) -> PlacedModels | None:
    """The run with other values; None where the config refuses these.

    Other sizes or ranks leave the number of replicas to follow from the ranks.
    """
    whole, ranks = dict(changes), world_size or run.world_size
    if ranks != run.world_size or any(key.endswith("tensor_parallel_size") for key in whole):
        whole |= {f"{name}.data_parallel_size": None for name in run.models}
    try:
        return with_room(place(with_changes(run.config, whole), ranks, cuda=run.cuda), room)
    except UserError:
        return None


def with_changes(config: AnyConfig, changes: Mapping[str, Any]) -> AnyConfig:
    """Errors: ConfigError of a config that refuses them."""
    tree = config.model_dump(mode="json")
    for path, value in changes.items():
        *sections, key = path.split(".")
        node: Any = tree
        for section in sections:
            node = node[int(section)] if isinstance(node, list) else node[section]
        node[key] = value
    return type(config).from_tree(tree, "the plan")
