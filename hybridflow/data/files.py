"""What holds for data files of every format: they are opened again and again, and have to stay as they are."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from hybridflow.errors import DataError
from hybridflow.formats.git_lfs import NOT_FETCHED, is_pointer

BLOCK = 4 << 20
MOST_DIGESTED = 1 << 30  # bytes of a file; the digest of a larger file is of the size and of some blocks
NUM_SAMPLED = 64


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Errors: DataError where it cannot be read, or not again."""
    try:
        with path.open("rb") as file:
            if not file.seekable():
                raise DataError(f"{path}: is no regular file, but rows are read again on use")
            if is_pointer(file.read(64)):
                raise DataError(f"{path}: {NOT_FETCHED}")
            file.seek(0)
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path}: cannot be read: no such local file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Processes that make the same file wait for the first."""
    with path.open("w", encoding="utf-8") as lock:
        with suppress(OSError):  # a file system without locks: each rank of a host makes the file
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stamp(file: BinaryIO) -> tuple[int, int]:
    """What shows whether a file has changed: the size, and when the file was last written."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def check_unchanged(path: Path, file: BinaryIO, was: tuple[int, int]) -> None:
    if stamp(file) != was:
        raise DataError(
            f"{path}: has changed since the run began to read the file. The file must stay as it is, because rows are "
            "read again on use"
        )


def content_digest(file: BufferedReader, size: int) -> bytes:
    """Of all bytes; of a file above MOST_DIGESTED, of the size and blocks at equal distances, the last included.

    A hash of 10 GB takes longer than all else that happens before a run begins.
    """
    found = hashlib.blake2b(digest_size=16)
    if size <= MOST_DIGESTED:
        file.seek(0)
        return hashlib.file_digest(file, lambda: found).digest()
    found.update(str(size).encode())
    length = BLOCK // 4
    for i in range(NUM_SAMPLED):
        file.seek((size - length) * i // (NUM_SAMPLED - 1))
        found.update(file.read(length))
    return found.digest()
