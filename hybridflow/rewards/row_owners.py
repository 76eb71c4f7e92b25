"""Which worker has the state of which row: all calls of a row of an affine function go to one process."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol, TypeVar


class OfRow(Protocol):
    row: int | None


Call = TypeVar("Call", bound=OfRow)


class RowOwners:
    """Of affine functions: which worker has the state of each row, and which rows have lost theirs."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # pid by row
        self._lost: dict[int, str] = {}

    def taken(self, queue: deque[Call], pid: int, pids: Sequence[int]) -> Call | None:
        """The first call in the queue that is this worker's, or of a row that is nobody's yet and now is its own.

        pids: of all workers, of which those with fewest rows take new ones.
        """
        counts = Counter(self._owners.values())
        may_take = counts[pid] <= min(counts[other] for other in pids)
        for place, unit in enumerate(queue):
            assert unit.row is not None, "a call of an affine function has a row"
            owner = self._owners.get(unit.row)
            if owner == pid or (owner is None and may_take):
                self._owners[unit.row] = pid
                del queue[place]
                return unit
        return None

    def lose(self, pid: int, why: str) -> set[int]:
        """The worker is gone: its rows."""
        gone = {row for row, owner in self._owners.items() if owner == pid}
        self._lost |= dict.fromkeys(gone, why)
        self._owners = {row: owner for row, owner in self._owners.items() if row not in gone}
        return gone

    def why_lost(self, row: int | None) -> str | None:
        return None if row is None else self._lost.get(row)

    def forget(self, row: int) -> None:
        """Nobody calls for it any more."""
        self._owners.pop(row, None)
        self._lost.pop(row, None)
