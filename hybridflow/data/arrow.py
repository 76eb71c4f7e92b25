"""An Arrow file, as `datasets` keeps them (a stream of batches), mapped into memory: rows are read where they lie.

    file = Arrow(Path("saved/data-00000-of-00001.arrow"))
    [first, other] = file.rows_at([0, 7])

Imported where there is such a file, as `parquet`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow

from hybridflow.data.files import check_unchanged, content_digest, opened, stamp
from hybridflow.data.parquet import PROBLEMS, first_line, row_at
from hybridflow.data.rows import Row
from hybridflow.errors import DataError

FILE_MAGIC = b"ARROW1"  # of the format with a footer; a stream has none


class Arrow:
    """The rows of a file. Errors: DataError where it cannot be read, or is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self._stamp = stamp(file)
            self.num_bytes = self._stamp[0]
            self.digest = content_digest(file, self.num_bytes)
            file.seek(0)
            has_footer = file.read(len(FILE_MAGIC)) == FILE_MAGIC
        try:
            self._batches = _batches(path, has_footer)
        except PROBLEMS as error:
            raise DataError(f"{path}: is no Arrow file, or not a whole one: {first_line(error)}") from error
        sizes = np.array([batch.num_rows for batch in self._batches], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Of memory, for all that grows with the number of rows; what is mapped is the system's."""
        return int(self._starts.nbytes)

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Errors: DataError if the file is not what it was."""
        homes = (np.searchsorted(self._starts, list(numbers), side="right") - 1).tolist()
        with opened(self.path) as file:
            check_unchanged(self.path, file, self._stamp)
            return [
                row_at(self._batches[home], int(number - self._starts[home]), f"{self.path}, row {number + 1}")
                for number, home in zip(numbers, homes, strict=True)
            ]


def _batches(path: Path, has_footer: bool) -> list[pyarrow.RecordBatch]:
    source = pyarrow.memory_map(str(path))
    if has_footer:
        reader = pyarrow.ipc.open_file(source)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    return list(pyarrow.ipc.open_stream(source))
