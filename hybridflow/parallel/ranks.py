"""Ranks as people read and write them. Pure.

"0-7,12"    the ranks 0 to 7 and 12: inclusive intervals and single ranks, ascending, each once
"""

from collections.abc import Sequence

Ranks = tuple[int, ...]  # ascending


def shown(ranks: Sequence[int]) -> str:
    """Ranks as a `ranks` key names them."""
    intervals: list[tuple[int, int]] = []
    for rank in ranks:
        if intervals and rank == intervals[-1][1] + 1:
            intervals[-1] = intervals[-1][0], rank
        else:
            intervals.append((rank, rank))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in intervals)


def counted(number: int, what: str = "rank") -> str:
    """`1 rank`, `8 hosts`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
