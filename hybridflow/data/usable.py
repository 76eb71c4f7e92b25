"""The rows of data files as what a run takes of them: encoded when they are asked for, wrong ones refused or left out.

    prompts = UsableRows(files, encode, Rules(bad_rows="drop", overlong="drop"))
    drawn = prompts.draw(order, 64)      # drawn.items, drawn.numbers, drawn.dropped

Files of up to `checked_bytes` are checked as a whole at the start: what is wrong in them is known before a run begins,
and what is left out has no place in the order of rows. A row of a larger file is checked when the run reaches the row.
A row that is left out then is passed over, but keeps a place in the order. The same holds for a row that an environment
does not begin, whatever the size of the file. The order is always a function of the seed and the place.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol

import torch
from torch import Tensor

from hybridflow.data.order import MixedOrder, PromptOrder
from hybridflow.data.rows import Item, NotStarted, OverlongError, Row, RowError
from hybridflow.data.sources import Files
from hybridflow.errors import DataError

CHUNK_ROWS = 2048  # are encoded together, or fewer where they are long: a chunk takes some 100 bytes a token meanwhile
CHUNK_BYTES = 4 << 20
CHECKED_BYTES = 256 << 20

Encode = Callable[[Sequence[Row]], list[Item | RowError]]


class Order(Protocol):
    position: int

    def next(self, count: int) -> list[int]: ...


@dataclass(frozen=True)
class Rules:
    """What becomes of rows that cannot be used."""

    bad_rows: Literal["error", "drop"]
    overlong: Literal["error", "drop"]

    def drops(self, error: RowError) -> bool:
        return (
            isinstance(error, NotStarted)
            or (self.overlong if isinstance(error, OverlongError) else self.bad_rows) == "drop"
        )


@dataclass
class Dropped:
    """Rows that were left out: how many for which reason, and the first of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    shortest: int | None = None  # tokens, of those that are too long

    def add(self, error: RowError) -> None:
        self.counts[error.reason] = self.counts.setdefault(error.reason, 0) + 1
        self.first.setdefault(error.reason, str(error))
        if isinstance(error, OverlongError):
            self.shortest = min(self.shortest or error.length, error.length)

    @property
    def num_rows(self) -> int:
        return sum(self.counts.values())

    @property
    def num_overlong(self) -> int:
        return sum(count for reason, count in self.counts.items() if reason == "too long")

    @property
    def num_not_started(self) -> int:
        return self.counts.get("not started", 0)

    @property
    def num_bad(self) -> int:
        return self.num_rows - self.num_overlong - self.num_not_started


@dataclass(frozen=True)
class Drawn(Generic[Item]):
    items: list[Item]
    numbers: list[int]  # of the items, among the rows that there are
    dropped: Dropped  # rows that were passed over


class UsableRows(Generic[Item]):
    """See the module. Numbers are those of rows that are not known to be left out.

    Raises:
        DataError: a file, or a row that is not left out, cannot be used; names the file, the row and the rule.
    """

    def __init__(self, files: Files, encode: Encode[Item], rules: Rules, *, checked_bytes: int = CHECKED_BYTES) -> None:
        self.files, self._encode, self._rules = files, encode, rules
        self.dropped, self.not_started = Dropped(), Dropped()  # at the start
        self.is_checked, self.checked_bytes = files.num_bytes <= checked_bytes, checked_bytes
        self._kept: Tensor | None = self._check() if self.is_checked else None

    def __len__(self) -> int:
        return len(self.files) if self._kept is None else len(self._kept)

    def order(self, seed: int, shuffle: bool, *, position: int = 0) -> Order:
        """Which rows come next; sources with weights by turns."""
        if self.files.weights is None:
            return PromptOrder(len(self), seed, shuffle, position=position)
        return MixedOrder(self.lengths(), self.files.weights, seed, shuffle, position=position)

    def items_at(self, numbers: Sequence[int]) -> list[Item]:
        """In this order; one may appear twice. Errors: DataError also for a row that would be left out."""
        found = self.items_or_errors_at(numbers)
        for item in found:
            if isinstance(item, RowError):
                raise item
        return [item for item in found if not isinstance(item, RowError)]

    def items_or_errors_at(self, numbers: Sequence[int]) -> list[Item | RowError]:
        """As `items_at`, with the error in the place of a row that cannot be used."""
        return self._items_or_errors(self._rows_of(numbers))

    def draw(self, order: Order, count: int) -> Drawn[Item]:
        """The next `count` that can be used."""
        drawn: Drawn[Item] = Drawn([], [], Dropped())
        fruitless = 0  # in a row
        while len(drawn.items) < count:
            numbers = order.next(count - len(drawn.items))
            found = self._items_or_errors(self._rows_of(numbers))
            fruitless = 0 if any(not isinstance(item, RowError) for item in found) else fruitless + len(found)
            for number, item in zip(numbers, found, strict=True):
                if isinstance(item, RowError):
                    drawn.dropped.add(self._left_out(item))
                else:
                    drawn.items.append(item)
                    drawn.numbers.append(number)
            if fruitless >= 2 * len(self):
                raise DataError(f"no row can be used: {next(iter(drawn.dropped.first.values()))}")
        return drawn

    def rows_ahead(self, order: Order, count: int) -> list[Row]:
        """The rows that `draw` looks at first the next time."""
        return [row for row in self._rows_of(copy(order).next(count)) if row.problem is None]

    # ---- inside

    def lengths(self) -> list[int]:
        """Rows of each source. Errors: DataError where a source has none left, or no turn because of the weight."""
        kept = self.files.ends if self._kept is None else torch.searchsorted(self._kept, torch.tensor(self.files.ends))
        ends = [int(end) for end in kept]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        for name, length in zip(self.files.names, lengths, strict=True):
            if not length:
                raise DataError(f"{name}: no row is left of this file: {next(iter(self.dropped.first.values()))}")
        return lengths

    def _rows_of(self, numbers: Sequence[int]) -> list[Row]:
        return self.files.rows_at(numbers if self._kept is None else self._kept[list(numbers)].tolist())

    def _items_or_errors(self, rows: Sequence[Row]) -> list[Item | RowError]:
        """What becomes of each row; those that could not even be read are not encoded."""
        encoded = iter(self._encode([row for row in rows if row.problem is None]))
        return [next(encoded) if row.problem is None else row.problem for row in rows]

    def _left_out(self, error: RowError) -> RowError:
        """Raise it unless the rules say to leave the row out."""
        if not self._rules.drops(error):
            raise error
        return error

    def look_at_first(self, count: int) -> int:
        """How many of so many first rows, of all sources, can be used. Errors: DataError, as the rules say."""
        found = self.items_or_errors_at(range(min(count, len(self))))
        for item in found:
            if isinstance(item, RowError):
                self._left_out(item)
        return sum(not isinstance(item, RowError) for item in found)

    def _check(self) -> Tensor:
        """The numbers of the rows that can be used, of all."""
        kept = []
        for numbers in _chunks(len(self.files), self.files.num_bytes):
            judged = self._items_or_errors(self.files.rows_at(numbers))
            for number, item in zip(numbers, judged, strict=True):
                if isinstance(item, NotStarted):
                    self.not_started.add(item)
                    kept.append(number)
                elif isinstance(item, RowError):
                    self.dropped.add(self._left_out(item))
                else:
                    kept.append(number)
        return torch.tensor(kept, dtype=torch.int64)


def _chunks(num_rows: int, num_bytes: int) -> Iterator[range]:
    """Rows that are encoded together."""
    size = max(1, min(CHUNK_ROWS, num_rows * CHUNK_BYTES // max(num_bytes, 1)))
    for start in range(0, num_rows, size):
        yield range(start, min(start + size, num_rows))
