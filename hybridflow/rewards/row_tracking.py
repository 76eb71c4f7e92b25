"""Lists that know which row was read last, so that a function that raised for a batch need not be called row by row.

reading = RowTracking(len(prompts))
function(reading.watched(prompts), reading.watched(responses))
reading.at  # (4,) in the middle of a loop, (0, 1, 2, ...) at the end, (8, ..., 15) after prompts[8:16]
"""

from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, overload


class RowTracking:
    """at: the rows that were read last: one, those of a slice, those of a whole pass; none as long as none was read.

    A batch of one row is always at that row.
    """

    def __init__(self, num_rows: int) -> None:
        self.at: Sequence[int] = (0,) if num_rows == 1 else ()
        self._all = frozenset(range(num_rows))
        self._read: set[int] = set()
        self._in_loop = False

    def watched(self, values: Sequence[Any]) -> "TrackedRows":
        """A list of the values, one a row."""
        return TrackedRows(values, range(len(values)), self)

    def note(self, rows: Sequence[int], *, in_loop: bool = False) -> None:
        """in_loop: a loop asked for this row and not yet for the next."""
        self._in_loop = in_loop or (self._in_loop and tuple(rows) == tuple(self.at))
        self.at = rows
        self._read.update(rows)

    @property
    def is_past_all(self) -> bool:
        """Whether all rows were read and no loop is known to be at one of them; a single row is always the one."""
        return len(self._all) > 1 and self._read >= self._all and not self._in_loop


class TrackedRows(list[Any]):
    """A list that tells `reading` what is read of it. It may be changed: only rows still in their place count."""

    def __init__(self, values: Sequence[Any], rows: Sequence[int], reading: RowTracking) -> None:
        super().__init__(values)
        self._places = list(zip(rows, values, strict=True))  # what lay where, as far as that is known
        self._reading = reading

    @overload
    def __getitem__(self, place: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        if isinstance(place, slice):
            return self._part(place)
        value = super().__getitem__(place)
        self._note(range(len(self))[place], value)
        return value

    def __iter__(self) -> Iterator[Any]:
        for place, value in enumerate(super().__iter__()):
            self._note(place, value, in_loop=True)
            yield value
        self._reading.note([row for row, _ in self._places])

    def __contains__(self, wanted: object) -> bool:
        return any(value is wanted or value == wanted for value in self)

    def pop(self, place: SupportsIndex = -1) -> Any:
        value = super().pop(place)
        place = range(len(self) + 1)[place]
        self._note(place, value)
        del self._places[place : place + 1]
        return value

    def copy(self) -> list[Any]:
        return self[:]

    def _part(self, places: slice) -> list[Any]:
        values = super().__getitem__(places)
        rows = [row for row, _ in self._places[places]]
        if len(rows) != len(values):  # the list was changed
            return values
        if rows:
            self._reading.note(rows)
        return TrackedRows(values, rows, self._reading)

    def _note(self, place: int, value: Any, *, in_loop: bool = False) -> None:
        row, original = self._places[place] if place < len(self._places) else (0, self)
        if original is value:
            self._reading.note((row,), in_loop=in_loop)
