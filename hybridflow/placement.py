"""Which ranks a role lies on: what a `ranks` key means, and the rules that hold between roles. Pure.

ranks: [4, 8]             the interval 4 .. 7
ranks: [0, 1, 4, 5]       any other number of entries: these ranks
ranks: [[0, 2], [4, 6]]   intervals joined: 0, 1, 4, 5
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import ConfigError

Ranks = tuple[int, ...]
RankList = tuple[int, ...] | tuple[tuple[int, int], ...]


def well_formed(given: Any) -> Any:
    """What a `ranks` key was given, if it has one of the three forms. Errors: ValueError."""
    entries = given if isinstance(given, list | tuple) else []
    intervals = all(isinstance(x, list | tuple) and len(x) == 2 and all(type(y) is int for y in x) for x in entries)
    if given is not None and not (entries and (intervals or all(type(x) is int for x in entries))):
        raise ValueError(f"{given!r} is neither [start, stop], nor a list of ranks, nor a list of [start, stop]")
    return given


def resolve_ranks(given: RankList | None, world_size: int) -> Ranks:
    """The ranks that a `ranks` key means; None means all."""
    if given is None:
        return tuple(range(world_size))
    if isinstance(given[0], tuple):
        return tuple(rank for start, stop in given for rank in range(start, stop))
    return tuple(range(*given)) if len(given) == 2 else given


def check_ranks(key: str, given: RankList | None, world_size: int) -> Ranks:
    """The ranks, if they ascend and exist. Errors: ConfigError naming the key, what it says and what it means."""
    ranks = resolve_ranks(given, world_size)
    if not ranks:
        raise ConfigError(f"{key} = {_listed(given)} is an empty interval: [start, stop] needs start < stop")
    if list(ranks) != sorted(set(ranks)):
        raise ConfigError(f"{key} = {_listed(given)} means the ranks {list(ranks)}: ranks must ascend, each named once")
    for rank in (ranks[-1], ranks[0]):
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"{key} = {_listed(given)} names rank {rank}, the run has {world_size} ranks: 0 .. {world_size - 1}"
            )
    return ranks


def check_sizes(role: str, sizes: tuple[int, int, int | None], given: RankList | None, ranks: Ranks) -> None:
    """Tensor x pipeline x data parallel sizes (data parallel: None for what is left) are as many as the ranks."""
    tp, pp, dp = sizes
    count = len(ranks)
    where = "ranks of the run" if given is None else f"ranks of {role}.ranks = {_listed(given)}"
    if given is not None and len(given) == 2 and not isinstance(given[0], tuple):
        where += f", which is the interval {shown(ranks)}"
    if dp is None and count % (tp * pp):
        raise ConfigError(
            f"{role}: tensor_parallel_size x pipeline_parallel_size = {tp} x {pp} = {tp * pp} does not divide the "
            f"{count} {where}: {count} = {count // (tp * pp)} x {tp * pp} + {count % (tp * pp)}"
        )
    if dp is not None and tp * pp * dp != count:
        raise ConfigError(
            f"{role}: tensor_parallel_size x pipeline_parallel_size x data_parallel_size = {tp} x {pp} x {dp} = "
            f"{tp * pp * dp}, but there are {count} {where}"
        )


def check_engine_ranks(ranks: Ranks, actor: Ranks) -> None:
    """The engine lies on the actor's ranks or on none of them."""
    shared = sorted(set(ranks) & set(actor))
    if shared and ranks != actor:
        raise ConfigError(
            f"rollout.ranks = {shown(ranks)} and actor.ranks = {shown(actor)} share {shown(shared)}: the engine runs "
            f"on exactly the actor's ranks, where it uses the actor's memory, or on none of them"
        )


def check_engine_sizes(tp: int, pp: int, num_ranks: int) -> None:
    """The engine's replicas fill its ranks."""
    size = tp * pp
    if num_ranks % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size x rollout.pipeline_parallel_size = {tp} x {pp} = {size} does not divide the "
            f"{num_ranks} ranks of the engine: {num_ranks} = {num_ranks // size} x {size} + {num_ranks % size}"
        )


def check_placement(placed: Mapping[str, Ranks], world_size: int) -> None:
    """Every rank has work; any two roles lie on the same ranks, on others, or one within the other."""
    unused = sorted(set(range(world_size)) - {rank for ranks in placed.values() for rank in ranks})
    if unused:
        used = ", ".join(f"{key} = {shown(ranks)}" for key, ranks in placed.items())
        raise ConfigError(f"of the {world_size} ranks of the run nothing uses {shown(unused)}: {used}")
    for (one, first), (other, second) in itertools.combinations(placed.items(), 2):
        shared = sorted(set(first) & set(second))
        if shared and len(shared) < min(len(first), len(second)):
            raise ConfigError(
                f"{one} = {shown(first)} and {other} = {shown(second)} overlap in {shown(shared)} only: two roles lie "
                f"on the same ranks, on different ones, or one within the other; else each waits for the other"
            )


def shown(ranks: Sequence[int]) -> str:
    """'0 .. 3', or a list where ranks are not neighbours."""
    neighbours = len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} .. {ranks[-1]}" if neighbours else ", ".join(map(str, ranks))


def _listed(given: RankList | None) -> list:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in given or ()]
