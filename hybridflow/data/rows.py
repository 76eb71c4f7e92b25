"""A row of a data file as it was read, and why one cannot be used.

A wrong row is no exception until somebody wants to use the row: a reader of many rows gives a `RowError` in the row's
place, and `hybridflow.data.usable` raises or counts the error as the config says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hybridflow.errors import DataError

Item = TypeVar("Item")
Given = TypeVar("Given")


class RowError(DataError):
    """One row cannot be used. reason: under which name it is counted where such rows are left out."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OverlongError(RowError):
    """One row has too many tokens. length: how many, where somebody wants to know."""

    def __init__(self, message: str, length: int) -> None:
        super().__init__(message, "too long")
        self.length = length


class NotStarted(RowError):
    """An environment does not begin one row now, but may begin the row later: this time the row is passed over."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "not started")


@dataclass(frozen=True)
class Row:
    where: str  # file and line, for messages
    fields: dict[str, Any]
    problem: RowError | None = None  # why it has no fields
    fills_nulls: bool = False  # the file's format writes null for what this row lacks and another row has


class DataRows(Protocol):
    """The rows of one file or of several, by number from 0. num_bytes: of the files."""

    def __len__(self) -> int: ...

    def rows_at(self, numbers: Sequence[int]) -> list[Row]: ...

    @property
    def digest(self) -> bytes: ...

    @property
    def num_bytes(self) -> int: ...


def attempt(function: Callable[[Given], Item], given: Given) -> Item | RowError:
    """What `function` gives, or the RowError that it raises."""
    try:
        return function(given)
    except RowError as error:
        return error


def shown(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
