"""Which roles lie together on which ranks: every grouping, and every division of the ranks among the groups. Pure.

    for placement in placements(("actor", "critic", "reference", "engine"), 64, ranks_per_host=8): ...

HybridFlow's algorithm 1 (Sheng et al. 2024, arXiv 2409.19256, section 6) goes over the partitions of the models, and
over the divisions of the devices among them. Here the engine is one more thing to place: on the actor's ranks, where it
uses the actor's memory, or on others. Of the divisions those are left out that cut hosts unevenly, see `unit_of`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache

from hybridflow.config.auto import ENGINE
from hybridflow.parallel.ranks import Ranks

MOST_UNITS = 16  # that the ranks are divided in


class Placement(dict[str, Ranks]):
    """The ranks of each role by config key, and of the engine as `engine`."""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The roles that share ranks, by first rank."""
        found: dict[Ranks, list[str]] = {}
        for name, ranks in self.items():
            found.setdefault(ranks, []).append(name)
        return tuple(tuple(names) for _, names in sorted(found.items()))

    def __str__(self) -> str:
        groups = (f"{' + '.join(names)} on {len(self[names[0]])}" for names in self.groups)
        return " | ".join(groups)


def placements(
    names: Sequence[str], world_size: int, *, ranks_per_host: int, apart: str | None = None
) -> Iterator[Placement]:
    """Each grouping of the names over disjoint sets of ranks that are all ranks together, the same in every start.

    The larger a group the lower the ranks, so that one smaller than a host lies on one host. apart: a name that shares
    ranks with no other, and has the last ranks.
    """
    unit = unit_of(world_size, ranks_per_host)
    for groups in partitions(tuple(names)):
        if apart is not None and (apart,) not in groups:
            continue
        for sizes in divisions(world_size // unit, len(groups)):
            counts = [unit * size for size in sizes]
            if all(_suits_hosts(count, world_size, ranks_per_host) for count in counts):
                yield _placed(groups, counts, names, apart)


def unit_of(world_size: int, ranks_per_host: int) -> int:
    """The least number of ranks of a group: as few as leave at most `MOST_UNITS` units, whole hosts or parts of one."""
    fitting = [
        count
        for count in range(1, world_size + 1)
        if world_size % count == 0 and (count % ranks_per_host == 0 or ranks_per_host % count == 0)
    ]
    return next((count for count in fitting if world_size // count <= MOST_UNITS), world_size)


def _suits_hosts(count: int, world_size: int, ranks_per_host: int) -> bool:
    """A group has whole hosts or an even part of one; on a single host it may have any number."""
    return world_size <= ranks_per_host or count % ranks_per_host == 0 or ranks_per_host % count == 0


@lru_cache
def partitions(names: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The ways to put the names into groups, fewest groups first; a Bell number of them."""
    if not names:
        return ((),)
    first, rest = names[0], names[1:]
    found: list[tuple[tuple[str, ...], ...]] = []
    for groups in partitions(rest):
        found.append(((first,), *groups))
        for i, group in enumerate(groups):
            found.append(((first, *group), *groups[:i], *groups[i + 1 :]))
    return tuple(sorted(found, key=lambda groups: (len(groups), groups)))


def divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Positive numbers that are `total` together, in every order."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total - parts + 1, 0, -1):
        for rest in divisions(total - first, parts - 1):
            yield (first, *rest)


def _placed(
    groups: Sequence[tuple[str, ...]], counts: Sequence[int], names: Sequence[str], last: str | None
) -> Placement:
    ranks: dict[str, Ranks] = {}
    first = 0
    for group, count in sorted(zip(groups, counts, strict=True), key=lambda pair: (pair[0] == (last,), -pair[1])):
        ranks |= dict.fromkeys(group, _interval(first, count))
        first += count
    return Placement({name: ranks[name] for name in names})


@cache
def _interval(first: int, count: int) -> Ranks:
    """Shared by all placements that have it."""
    return tuple(range(first, first + count))


def given_placement(layout_ranks: Mapping[str, Ranks], engine: Ranks | None) -> Placement:
    """That of a config, whose roles may also lie one within another."""
    return Placement({**layout_ranks} | ({} if engine is None else {ENGINE: engine}))
