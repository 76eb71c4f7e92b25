"""A Parquet file: rows are read by the groups that it is cut into, of which the last ones used stay in memory.

    file = Parquet(Path("train.parquet"))
    [first, other] = file.rows_at([0, 7])

One row costs the reading of a whole group, so shuffled files do best with groups of some thousand rows, the size that
is usual. pyarrow takes 60 MB in each process: this module is imported where there is such a file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from hybridflow.data.files import check_unchanged, content_digest, opened, stamp
from hybridflow.data.rows import Row, RowError
from hybridflow.errors import DataError

MOST_KEPT = 256 << 20  # bytes of groups; at least one
PROBLEMS = (pyarrow.ArrowException, OSError)


class Parquet:
    """The rows of a file. Errors: DataError where it cannot be read, or is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self._stamp = stamp(file)
            self.num_bytes = self._stamp[0]
            self.digest = content_digest(file, self.num_bytes)
            file.seek(0)
            try:
                self._metadata = pyarrow.parquet.read_metadata(file)
            except PROBLEMS as error:
                raise DataError(f"{path}: is no Parquet file, or not a whole one: {first_line(error)}") from error
        groups = [self._metadata.row_group(i).num_rows for i in range(self._metadata.num_row_groups)]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(groups, np.int64))])
        self._kept: dict[int, pyarrow.Table] = {}  # the last ones used, the latest last

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Of memory, for all that grows with the number of rows; groups are held up to MOST_KEPT."""
        return int(self._starts.nbytes)

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Errors: DataError if the file is not what it was."""
        groups = (np.searchsorted(self._starts, list(numbers), side="right") - 1).tolist()
        found: dict[int, Row] = {}
        with opened(self.path) as file:
            check_unchanged(self.path, file, self._stamp)
            for group in sorted(set(groups)):
                wanted = [number for number, home in zip(numbers, groups, strict=True) if home == group]
                found |= zip(wanted, self._of_group(group, wanted), strict=True)
        return [found[number] for number in numbers]

    def _of_group(self, group: int, numbers: Sequence[int]) -> list[Row]:
        try:
            table = self._group(group)
        except PROBLEMS as error:
            message = f"its row group {group} cannot be read: {first_line(error)}"
            return [_wrong(self._where(number), message, "damaged") for number in numbers]
        return [row_at(table, int(number - self._starts[group]), self._where(number)) for number in numbers]

    def _group(self, group: int) -> pyarrow.Table:
        table = self._kept.pop(group, None)
        if table is None:
            with pyarrow.parquet.ParquetFile(self.path, metadata=self._metadata) as file:
                table = file.read_row_group(group)
        self._kept[group] = table
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return table

    def _where(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"


def row_at(table: pyarrow.Table | pyarrow.RecordBatch, place: int, where: str) -> Row:
    """The row at `place` as Python's values, or what is wrong with it."""
    try:
        fields: dict[str, Any] = table.slice(place, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return _wrong(where, f"is not UTF-8 text ({error.reason})", "not UTF-8")
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a time before the year 1, and the like
        return _wrong(where, f"cannot be read: {first_line(error)}", "damaged")
    return Row(where, fields, fills_nulls=True)


def _wrong(where: str, message: str, reason: str) -> Row:
    return Row(where, {}, RowError(f"{where}: {message}", reason))


def first_line(error: Exception) -> str:
    """What an error of pyarrow says; others follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]
