"""Directories that are complete and on the disk, or are not there; and sums that tell whether a file has changed."""

import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def replace_directory(partial: Path, target: Path) -> None:
    """Move a finished directory to `target`. The old target goes away only then, and is back if the move fails."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file or a directory on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


BLOCK_BYTES = 1 << 24
Read = Callable[[int], None]  # gets the bytes of each block once it is read


@dataclass(frozen=True)
class FileSum:
    """What a file must be to be intact."""

    size: int
    crc32: int


def file_sum(path: Path, read: Read = lambda num_bytes: None) -> FileSum:
    """Reads all of it. Errors: OSError."""
    size = crc32 = 0
    with path.open("rb", buffering=0) as file:
        block = bytearray(BLOCK_BYTES)
        while count := file.readinto(block):
            size, crc32 = size + count, zlib.crc32(memoryview(block)[:count], crc32)
            read(count)
    return FileSum(size, crc32)
