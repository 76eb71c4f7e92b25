"""Permutations of the blocks of a weight."""

from collections.abc import Iterator

Order = tuple[int, ...]  # block i becomes the former block order[i]


def cycles(order: Order) -> Iterator[list[int]]:
    """Those of more than one block: each block becomes the one after it in the list, the last one the first."""
    seen = [source == i for i, source in enumerate(order)]
    for start in range(len(order)):
        cycle, i = [], start
        while not seen[i]:
            seen[i] = True
            cycle.append(i)
            i = order[i]
        if cycle:
            yield cycle
