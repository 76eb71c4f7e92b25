"""A file that is one JSON array of objects: rows are found at the start, and a row is parsed on request.

    file = JsonArray(Path("train.json"))
    [first, other] = file.rows_at([0, 7])

Of the text only braces and strings are looked at, so a file of 1 GB takes seconds, and 16 bytes a row.
"""

import mmap
import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybridflow.data.files import BLOCK, check_unchanged, content_digest, opened, stamp
from hybridflow.data.json_lines import row_of
from hybridflow.data.rows import Row, shown
from hybridflow.errors import DataError

STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
TOKEN = re.compile(STRING + rb'|[{}"]', re.DOTALL)  # a lone quote begins a string that nothing ends
BLANK = re.compile(rb"[ \t\r\n]*+")
MARK = b"\xef\xbb\xbf"  # a byte order mark


class JsonArray:
    """The rows of a file. Errors: DataError where it cannot be read, or is not an array of objects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self._stamp = stamp(file)
            self.num_bytes = self._stamp[0]
            # closed with the last user: an error that is being raised still refers to the file
            self._places = _find_rows(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self.digest = content_digest(file, self.num_bytes)
            check_unchanged(path, file, self._stamp)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Of memory, for all that grows with the number of rows."""
        return self._places.nbytes

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Errors: DataError if the file is not what it was."""
        texts = []
        with opened(self.path) as file:
            for number in numbers:
                start, end = self._places[number].tolist()
                file.seek(start)
                texts.append(file.read(end - start))
            check_unchanged(self.path, file, self._stamp)
        return [row_of(text, f"{self.path}, row {i + 1}") for i, text in zip(numbers, texts, strict=True)]


def begins_as_array(path: Path) -> bool:
    """Whether the first character of a file is that of an array."""
    if not path.is_file():
        return False
    with opened(path) as file:
        return file.read(BLOCK).removeprefix(MARK).lstrip().startswith(b"[")


def _find_rows(path: Path, text: mmap.mmap) -> npt.NDArray[np.int64]:
    """(rows, 2): where each object starts and ends."""
    places = array("q")
    place = _next(text, text.find(b"[") + 1)
    more = text[place : place + 1] != b"]"
    while more:
        if text[place : place + 1] != b"{":
            raise _misplaced(path, text, place, "an object of named fields, which is a row")
        end = _end_of_object(text, place)
        if end is None:
            raise DataError(
                f"{path}, row {len(places) // 2 + 1}: is cut short: nothing ends what begins at byte {place:,}"
            )
        places.extend((place, end))
        place = _next(text, end)
        more = text[place : place + 1] == b","
        if more:
            place = _next(text, place + 1)
    if text[place : place + 1] != b"]":
        raise _misplaced(path, text, place, "a comma or the end of the array")
    after = _next(text, place + 1)
    if after < len(text):
        raise _misplaced(path, text, after, "nothing after the end of the array")
    return np.frombuffer(places, np.int64).reshape(-1, 2)


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
