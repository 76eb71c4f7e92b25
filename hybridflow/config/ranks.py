"""Which ranks a role lies on: what a `ranks` key means, and the rules that hold between roles. Pure.

ranks: "0-7,12"    the ranks 0 to 7 and 12: inclusive intervals and single ranks, ascending, each once
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from hybridflow.errors import ConfigError, Mendable, divisors, remedy
from hybridflow.parallel.ranks import Ranks, counted, shown

LARGEST_RANK = 1 << 20
RULE = 'ranks are inclusive intervals and single ranks, ascending, each once, such as "0-7,12"'


def parse_ranks(given: Any) -> Ranks | None:
    """The ranks that a `ranks` key names. Errors: ValueError with the rule, and for a list with what to write now."""
    if given is None:
        return None
    if isinstance(given, list | tuple):
        spelling = _spelling_of(given)
        raise ValueError(f'{_listed(given)} is now written "{spelling}"' if spelling else f"{given!r}: {RULE}")
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise ValueError(f"{given!r}: {RULE}")
    ranks = [rank for part in str(given).split(",") for rank in _interval(part.strip(), given)]
    if ranks != sorted(set(ranks)):
        raise Mendable(f"{given!r} names {shown(ranks)}: {RULE}", {"": [shown(sorted(set(ranks)))]})
    return tuple(ranks)


def _interval(text: str, given: str | int) -> range:
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    if not found:
        raise ValueError(f"{given!r}: {text!r} is no rank and no interval; {RULE}")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"{given!r}: the interval {text} is empty; {RULE}")
    if last > LARGEST_RANK:  # a slip that would fill the memory
        raise ValueError(f"{given!r}: no run has a rank {last}")
    return range(first, last + 1)


def _spelling_of(given: Sequence[Any]) -> str:
    """What a list meant: intervals [start, stop], one interval start, stop, or else ranks; "" if it meant nothing."""
    if all(isinstance(entry, list | tuple) and len(entry) == 2 for entry in given):
        intervals = [tuple(entry) for entry in given]
    elif len(given) == 2:
        intervals = [tuple(given)]
    else:
        intervals = [(rank, rank + 1) if type(rank) is int else (rank,) for rank in given]
    if not all(type(bound) is int and 0 <= bound <= LARGEST_RANK for interval in intervals for bound in interval):
        return ""
    ranks = [rank for start, stop in intervals for rank in range(start, stop)]
    return shown(ranks) if ranks == sorted(set(ranks)) else ""


def _listed(given: Sequence[Any]) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in given]


def check_ranks(key: str, given: Ranks | None, world_size: int) -> Ranks:
    """The ranks, all of them where none are given, if the run has them. Errors: ConfigError."""
    if given is None:
        return tuple(range(world_size))
    if given[-1] >= world_size:
        raise ConfigError(
            f"{key} = {shown(given)} names rank {given[-1]}, the run has {counted(world_size)}"
            f"{remedy({key: [shown(range(world_size))]})}"
        )
    return given


def check_sizes(role: str, sizes: Mapping[str, int], dp: int | None, given: Ranks | None, ranks: Ranks) -> None:
    """Tensor, pipeline, context and data parallel sizes are as many as the ranks.

    sizes: by key, without dp, which is None for what is left.
    """
    count, each = len(ranks), prod(sizes.values())
    names, numbers = " x ".join(sizes), " x ".join(map(str, sizes.values()))
    where = "ranks of the run" if given is None else f"ranks of {role}.ranks = {shown(given)}"
    keys = {f"{role}.{key}": size for key, size in sizes.items()}
    if dp is None and count % each:
        raise ConfigError(
            f"{role}: {names} = {numbers} = {each} does not divide the {count} {where}: "
            f"{count} = {count // each} x {each} + {count % each}"
            f"{remedy(dividing(keys, count), f'take a multiple of {each} ranks')}"
        )
    if dp is not None and each * dp != count:
        key = f"{role}.data_parallel_size"
        fitting: dict[str, list[Any]] = {key: [count // each, None]}
        if count % each:
            fitting = {name: [f"{values[-1]} {key}=null"] for name, values in dividing(keys, count).items()}
        raise ConfigError(
            f"{role}: {names} x data_parallel_size = {numbers} x {dp} = {each * dp}, but there are {count} {where}"
            f"{remedy(fitting, f'take {counted(each * dp)}')}"
        )


def dividing(sizes: Mapping[str, int], count: int) -> dict[str, list[Any]]:
    """Of each key the values with which the product divides `count`, where other keys stay; else all keys at 1.

    For `remedy`. sizes: by the key, as a person types it.
    """
    others = {key: prod(sizes.values()) // size for key, size in sizes.items()}
    found: dict[str, list[Any]] = {key: divisors(count // each) for key, each in others.items() if count % each == 0}
    first, *more = [key for key, size in sizes.items() if size > 1]
    return found or {first: [" ".join(["1", *(f"{key}=1" for key in more)])]}


def check_engine_ranks(ranks: Ranks, actor: Ranks) -> None:
    """The engine lies on the actor's ranks or on none of them."""
    shared = sorted(set(ranks) & set(actor))
    if shared and ranks != actor:
        raise ConfigError(
            f"rollout.ranks = {shown(ranks)} and actor.ranks = {shown(actor)} share {shown(shared)}: the engine must "
            f"have exactly the actor's ranks, or none of them{remedy({'rollout.ranks': [shown(actor)]})}"
        )


def check_engine_sizes(tp: int, pp: int, num_ranks: int) -> None:
    """The engine's replicas fill the engine's ranks."""
    size = tp * pp
    if num_ranks % size:
        keys = {"rollout.tensor_parallel_size": tp, "rollout.pipeline_parallel_size": pp}
        raise ConfigError(
            f"rollout.tensor_parallel_size x rollout.pipeline_parallel_size = {tp} x {pp} = {size} does not divide the "
            f"{num_ranks} ranks of the engine: {num_ranks} = {num_ranks // size} x {size} + {num_ranks % size}"
            f"{remedy(dividing(keys, num_ranks))}"
        )


def check_placement(placed: Mapping[str, Ranks], world_size: int) -> None:
    """Every rank has work; any two roles lie on the same ranks, on others, or one within the other."""
    unused = sorted(set(range(world_size)) - {rank for ranks in placed.values() for rank in ranks})
    if unused:
        used = ", ".join(f"{key} = {shown(ranks)}" for key, ranks in placed.items())
        raise ConfigError(
            f"of the {world_size} ranks of the run nothing uses {shown(unused)}, which leaves {counted(len(unused))} "
            f"idle: {used}"
            f"{remedy(_widened(placed, unused), f'take {counted(world_size - len(unused))}')}"
        )
    for (one, first), (other, second) in itertools.combinations(placed.items(), 2):
        if shared := _overlap(first, second):
            both = shown(sorted({*first, *second}))
            raise ConfigError(
                f"{one} = {shown(first)} and {other} = {shown(second)} overlap in {shown(shared)} only. Two roles must "
                "lie on the same ranks, on different ranks, or one within the other. Otherwise each waits for the "
                f"other{remedy({one: [both], other: [both]})}"
            )


def _overlap(one: Ranks, other: Ranks) -> list[int]:
    """The ranks of both, where neither lies within the other."""
    shared = sorted(set(one) & set(other))
    return shared if len(shared) < min(len(one), len(other)) else []


def _widened(placed: Mapping[str, Ranks], unused: list[int]) -> dict[str, list[str]]:
    """By key the ranks that have the unused ones too, where no role overlaps with another then."""
    wider = {key: tuple(sorted({*ranks, *unused})) for key, ranks in placed.items()}
    others = {key: [ranks for other, ranks in placed.items() if other != key] for key in placed}
    return {key: [shown(wider[key])] for key in placed if not any(_overlap(wider[key], each) for each in others[key])}
