"""A JSON-lines file: lines are found at the start, by their ends alone; a row is parsed on request.

    file = JsonLines(Path("train.jsonl"))
    [first, other] = file.rows_at([0, 7])

So a file of 10 GB is there after the seconds that one reading takes, and costs eight bytes a line.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hybridflow.data.files import BLOCK, check_unchanged, content_digest, opened, stamp
from hybridflow.data.rows import Row, RowError

Places = npt.NDArray[np.int64]
NEWLINE, RETURN, BRACE = b"\n"[0], b"\r"[0], b"{"[0]


class JsonLines:
    """The rows of a file: lines that are not blank. Errors: DataError where the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self._stamp = stamp(file)
            self.num_bytes = self._stamp[0]
            self._starts, suspects = _find_lines(file)
            blank = [line for line in suspects.tolist() if not _decoded(self._line(file, line)).strip()]
            # which lines the rows are, where not each line is one
            self._lines = np.delete(np.arange(len(self._starts) - 1), blank) if blank else None
            self.digest = content_digest(file, self.num_bytes)
            check_unchanged(path, file, self._stamp)

    def __len__(self) -> int:
        return len(self._starts) - 1 if self._lines is None else len(self._lines)

    @property
    def nbytes(self) -> int:
        """Of memory, for all that grows with the number of rows."""
        return self._starts.nbytes + (0 if self._lines is None else self._lines.nbytes)

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Errors: DataError if the file is not what it was."""
        lines = [number if self._lines is None else int(self._lines[number]) for number in numbers]
        with opened(self.path) as file:
            found = [self._line(file, line) for line in lines]
            check_unchanged(self.path, file, self._stamp)
        return [row_of(text, f"{self.path}, line {line + 1}") for line, text in zip(lines, found, strict=True)]

    def _line(self, file: BinaryIO, line: int) -> bytes:
        start, end = self._starts[line : line + 2].tolist()
        file.seek(start)
        text = file.read(end - start)
        return text.removeprefix(b"\xef\xbb\xbf") if start == 0 else text  # a byte order mark


def _find_lines(file: BinaryIO) -> tuple[Places, Places]:
    """Where each line starts, and last where the file ends; and the lines that do not begin with {, as few are blank.

    A line ends with \\n, with \\r\\n or with a \\r alone.
    """
    starts, suspects = [np.zeros(1, np.int64)], []
    base = num_lines = 0  # bytes and line ends before the block
    begins = True  # whether a line begins with the block
    for block in _blocks(file):
        codes = np.frombuffer(block, np.uint8)
        ends = _ends(block, codes)
        firsts = np.concatenate([np.zeros(int(begins), np.int64), ends[ends < len(block)]])
        numbers = np.arange(len(firsts)) + num_lines + (not begins)
        suspects.append(numbers[codes[firsts] != BRACE])
        starts.append(base + ends)
        begins = len(ends) > 0 and int(ends[-1]) == len(block)
        base, num_lines = base + len(block), num_lines + len(ends)
    if not begins:
        starts.append(np.array([base]))  # of a last line that nothing ends
    return np.concatenate(starts), np.concatenate([np.zeros(0, np.int64), *suspects])


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """The file in pieces, none of which ends between \\r and \\n."""
    while block := file.read(BLOCK):
        while block.endswith(b"\r") and (more := file.read(1)):
            block += more
        yield block


def _ends(block: bytes, codes: npt.NDArray[np.uint8]) -> Places:
    """The places after the ends of lines."""
    found = codes == NEWLINE
    if b"\r" in block:
        alone = codes == RETURN
        alone[:-1] &= codes[1:] != NEWLINE
        found |= alone
    return np.flatnonzero(found) + 1


def _decoded(text: bytes) -> str:
    return text.decode(errors="replace")


def row_of(text: bytes, where: str) -> Row:
    try:
        return Row(where, parsed(text, where))
    except RowError as error:
        return Row(where, {}, error)


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """The object that is a row. Errors: RowError naming `where`."""
    try:
        row = json.loads(text.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        message = f"{where}: is not UTF-8 text ({error.reason}); data files are JSON lines or Parquet"
        raise RowError(message, "not UTF-8") from error
    except json.JSONDecodeError as error:
        below = f"line {error.lineno} of it, " if error.lineno > 1 else ""
        message = f"{where}: is not JSON: {error.msg} at {below}column {error.colno}{_array_hint(text)}"
        raise RowError(message, "not JSON") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise RowError(f"{where}: is JSON that cannot be read: {error}", "not JSON") from error
    if not isinstance(row, dict):
        message = f"{where}: is a JSON {type(row).__name__}, expected an object of named fields{_array_hint(text)}"
        raise RowError(message, "no object")
    return row


def _array_hint(text: bytes) -> str:
    return "; a file that is one JSON array is read where it is called .json" if text.lstrip()[:1] == b"[" else ""
