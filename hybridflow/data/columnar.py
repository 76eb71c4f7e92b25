"""Parquet files, and Arrow files as `datasets` keeps them (a stream of batches): rows by number, of either.

    file = Columnar(Path("train.parquet"))
    [first, other] = file.rows_at([0, 7])

An Arrow file is mapped into memory, and rows are read where they lie. Parquet is read by the groups that a file is cut
into, of which the last ones used stay in memory. One row costs the reading of a whole group, so shuffled files do best
with groups of some thousand rows, the size that is usual. pyarrow takes 60 MB in each process: this module is imported
where there is such a file.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow
import pyarrow.parquet

from hybridflow.data.files import check_unchanged, content_digest, opened, stamp
from hybridflow.data.listing import ARROW
from hybridflow.data.rows import Row, RowError
from hybridflow.errors import DataError

MOST_KEPT = 256 << 20  # bytes of Parquet's groups; at least one
FILE_MAGIC = b"ARROW1"  # of Arrow's format with a footer; a stream has none
PROBLEMS = (pyarrow.ArrowException, OSError)
Group: TypeAlias = pyarrow.Table | pyarrow.RecordBatch
Groups = tuple[list[int], Callable[[int], Group]]  # rows of each group, and what reads one


class Columnar:
    """The rows of a file. Errors: DataError where it cannot be read, or is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kind, groups = ("Arrow", _arrow_batches) if path.suffix == ARROW else ("Parquet", _parquet_groups)
        with opened(path) as file:
            self._stamp = stamp(file)
            self.num_bytes = self._stamp[0]
            self.digest = content_digest(file, self.num_bytes)
            file.seek(0)
            try:
                sizes, self._group = groups(path, file)
            except PROBLEMS as error:
                raise DataError(f"{path}: is no {kind} file, or not a whole one: {_first_line(error)}") from error
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Errors: DataError if the file is not what it was."""
        homes = (np.searchsorted(self._starts, list(numbers), side="right") - 1).tolist()
        found: dict[int, Row] = {}
        with opened(self.path) as file:
            check_unchanged(self.path, file, self._stamp)
            for group in sorted(set(homes)):
                wanted = [number for number, home in zip(numbers, homes, strict=True) if home == group]
                found |= zip(wanted, self._of_group(group, wanted), strict=True)
        return [found[number] for number in numbers]

    def _of_group(self, group: int, numbers: Sequence[int]) -> list[Row]:
        where = [f"{self.path}, row {number + 1}" for number in numbers]
        try:
            table = self._group(group)
        except PROBLEMS as error:
            message = f"its row group {group} cannot be read: {_first_line(error)}"
            return [_wrong(each, message, "damaged") for each in where]
        start = int(self._starts[group])
        return [_row_at(table, number - start, each) for number, each in zip(numbers, where, strict=True)]


def _arrow_batches(path: Path, file: BinaryIO) -> Groups:
    has_footer = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    source = pyarrow.memory_map(str(path))
    reader = pyarrow.ipc.open_file(source) if has_footer else pyarrow.ipc.open_stream(source)
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)] if has_footer else list(reader)
    return [batch.num_rows for batch in batches], batches.__getitem__


def _parquet_groups(path: Path, file: BinaryIO) -> Groups:
    metadata = pyarrow.parquet.read_metadata(file)
    kept: dict[int, pyarrow.Table] = {}  # the last ones used, the latest last

    def group(number: int) -> pyarrow.Table:
        table = kept.pop(number, None)
        if table is None:
            with pyarrow.parquet.ParquetFile(path, metadata=metadata) as whole:
                table = whole.read_row_group(number)
        kept[number] = table
        while len(kept) > 1 and sum(each.nbytes for each in kept.values()) > MOST_KEPT:
            del kept[next(iter(kept))]
        return table

    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], group


def _row_at(table: Group, place: int, where: str) -> Row:
    """The row at `place` as Python's values, or what is wrong with it."""
    try:
        fields: dict[str, Any] = table.slice(place, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return _wrong(where, f"is not UTF-8 text ({error.reason})", "not UTF-8")
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a time before the year 1, and the like
        return _wrong(where, f"cannot be read: {_first_line(error)}", "damaged")
    return Row(where, fields, fills_nulls=True)


def _wrong(where: str, message: str, reason: str) -> Row:
    return Row(where, {}, RowError(f"{where}: {message}", reason))


def _first_line(error: Exception) -> str:
    """What an error of pyarrow says; others follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]
