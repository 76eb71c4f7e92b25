"""Calls of rows of an affine function: all calls of a row go to the one worker that has the state of the row."""

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class CallOfRow(Protocol):
    """number: calls ascend by it in the order in which they came."""

    number: int
    row: int | None


Call = TypeVar("Call", bound=CallOfRow)


class RowOwners(Generic[Call]):
    """Calls that wait, which worker has the state of each row, and which rows have lost the state.

    A call is looked at when it comes and when it goes, whatever waits beside it.
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}  # pid by row
        self._rows: defaultdict[int, set[int]] = defaultdict(set)  # by pid
        self._lost: dict[int, str] = {}
        self._first: OrderedDict[int, deque[Call]] = OrderedDict()  # by row without an owner, in order of first calls
        self._owned: defaultdict[int, list[tuple[int, Call]]] = defaultdict(list)  # by pid: a heap

    def has_calls(self) -> bool:
        """Whether a call waits."""
        return bool(self._first) or any(self._owned.values())

    def add(self, call: Call) -> None:
        """It waits for a worker."""
        assert call.row is not None, "a call of an affine function has a row"
        owner = self._owners.get(call.row)
        if owner is None:
            self._first.setdefault(call.row, deque()).append(call)
        else:
            heapq.heappush(self._owned[owner], (call.number, call))

    def assign_call(self, pid: int, pids: Sequence[int]) -> Call | None:
        """The first call that waits for this worker, or of a row without an owner: the worker owns the row from now on.

        pids: of all workers, of which those with fewest rows take new rows.
        """
        own = self._owned[pid]
        new = next(iter(self._first.values()), None)
        if new is not None and self._num_rows(pid) > min(map(self._num_rows, pids)):
            new = None
        if new is not None and (not own or new[0].number < own[0][0]):
            return self._own_first(pid)
        return heapq.heappop(own)[1] if own else None

    def pop_first(self) -> Call | None:
        """The first call of a row without an owner, which gets none."""
        if not self._first:
            return None
        calls = next(iter(self._first.values()))
        call = calls.popleft()
        if not calls:
            self._first.popitem(last=False)
        return call

    def lose(self, pid: int, why: str) -> list[Call]:
        """The worker is gone, and the rows with it: the calls that waited for the worker, in order."""
        gone = self._rows.pop(pid, set())
        self._lost |= dict.fromkeys(gone, why)
        for row in gone:
            del self._owners[row]
        return [call for _, call in sorted(self._owned.pop(pid, []), key=lambda numbered: numbered[0])]

    def why_lost(self, row: int | None) -> str | None:
        return None if row is None else self._lost.get(row)

    def forget(self, row: int) -> None:
        """Nobody calls for the row any more."""
        owner = self._owners.pop(row, None)
        if owner is not None:
            self._rows[owner].discard(row)
        self._lost.pop(row, None)

    def _num_rows(self, pid: int) -> int:
        return len(self._rows[pid])

    def _own_first(self, pid: int) -> Call:
        """The first call of the first row without an owner; the worker has the later calls of the row, too."""
        row, calls = self._first.popitem(last=False)
        self._owners[row] = pid
        self._rows[pid].add(row)
        first = calls.popleft()
        for call in calls:
            heapq.heappush(self._owned[pid], (call.number, call))
        return first
