"""JSON files, which are lines or one array of objects: rows are found at the start, and a row is parsed on request.

    file = JsonRows(Path("train.jsonl"))
    [first, other] = file.rows_at([0, 7])

Lines are found by their ends alone: a file of 10 GB is there after the seconds that one reading takes, and costs eight
bytes a line. Of an array only braces and strings are looked at: a file of 1 GB takes seconds, and 16 bytes a row.
"""

import json
import mmap
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hybridflow.data.files import BLOCK, check_unchanged, content_digest, opened, stamp
from hybridflow.data.listing import JSON
from hybridflow.data.rows import Row, RowError, shown
from hybridflow.errors import DataError

Places = npt.NDArray[np.int64]
NEWLINE, RETURN, BRACE = b"\n"[0], b"\r"[0], b"{"[0]
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
TOKEN = re.compile(STRING + rb'|[{}"]', re.DOTALL)  # a lone quote begins a string that nothing ends
BLANK = re.compile(rb"[ \t\r\n]*+")
MARK = b"\xef\xbb\xbf"  # a byte order mark


class JsonRows:
    """The rows of a file: the objects of an array, or lines that are not blank.

    Errors: DataError where the file cannot be read, or is an array of something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_array = path.suffix == JSON and begins_as_array(path)
        self._unit = "row" if is_array else "line"
        with opened(path) as file:
            self._stamp = stamp(file)
            self.num_bytes = self._stamp[0]
            if is_array:
                # closed with the last user: an error that is being raised still refers to the file
                text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._starts, self._ends = _find_objects(path, text)
                blank = list[int]()
            else:
                self._starts, suspects = _find_lines(file)
                self._ends = self._starts[1:]
                blank = [
                    line for line in suspects.tolist() if not self._text(file, line).decode(errors="replace").strip()
                ]
            # which places the rows have, where not each place is one
            self._places = np.delete(np.arange(len(self._ends)), blank) if blank else None
            self.digest = content_digest(file, self.num_bytes)
            check_unchanged(path, file, self._stamp)

    def __len__(self) -> int:
        return len(self._ends if self._places is None else self._places)

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Errors: DataError if the file is not what it was."""
        places = [number if self._places is None else int(self._places[number]) for number in numbers]
        with opened(self.path) as file:
            texts = [self._text(file, place) for place in places]
            check_unchanged(self.path, file, self._stamp)
        where = [f"{self.path}, {self._unit} {place + 1}" for place in places]
        return [_row_of(text, each) for text, each in zip(texts, where, strict=True)]

    def _text(self, file: BinaryIO, place: int) -> bytes:
        start, end = int(self._starts[place]), int(self._ends[place])
        file.seek(start)
        text = file.read(end - start)
        return text.removeprefix(MARK) if start == 0 else text


# ------------------------------------------------------------------------------------------------ lines


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


# ------------------------------------------------------------------------------------------------ an array


def begins_as_array(path: Path) -> bool:
    """Whether the first character of a file is that of an array."""
    if not path.is_file():
        return False
    with opened(path) as file:
        return file.read(BLOCK).removeprefix(MARK).lstrip().startswith(b"[")


def _find_objects(path: Path, text: mmap.mmap) -> tuple[Places, Places]:
    """Where each object starts, and where it ends."""
    starts, ends = array("q"), array("q")
    place = _next(text, text.find(b"[") + 1)
    more = text[place : place + 1] != b"]"
    while more:
        if text[place : place + 1] != b"{":
            raise _misplaced(path, text, place, "an object of named fields, which is a row")
        end = _end_of_object(text, place)
        if end is None:
            raise DataError(f"{path}, row {len(ends) + 1}: is cut short: nothing ends what begins at byte {place:,}")
        starts.append(place)
        ends.append(end)
        place = _next(text, end)
        more = text[place : place + 1] == b","
        if more:
            place = _next(text, place + 1)
    if text[place : place + 1] != b"]":
        raise _misplaced(path, text, place, "a comma or the end of the array")
    after = _next(text, place + 1)
    if after < len(text):
        raise _misplaced(path, text, after, "nothing after the end of the array")
    return np.array(starts, np.int64), np.array(ends, np.int64)


def _next(text: mmap.mmap, place: int) -> int:
    blank = BLANK.match(text, place)
    assert blank is not None, "no blank at all is a match"
    return blank.end()


def _end_of_object(text: mmap.mmap, start: int) -> int | None:
    depth = 0
    for token in TOKEN.finditer(text, start):
        first = text[token.start()]
        if first == ord('"') and len(token[0]) == 1:
            return None
        if first == ord("{"):
            depth += 1
        elif first == ord("}"):
            depth -= 1
            if not depth:
                return token.end()
    return None


def _misplaced(path: Path, text: mmap.mmap, place: int, expected: str) -> DataError:
    found = shown(text[place : place + 20].decode(errors="replace")) if place < len(text) else "the end of the file"
    return DataError(f"{path}: is no JSON array of objects: byte {place:,} is {found}, expected {expected}")


# ------------------------------------------------------------------------------------------------ a row


def _row_of(text: bytes, where: str) -> Row:
    try:
        return Row(where, _parsed(text, where))
    except RowError as error:
        return Row(where, {}, error)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
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
