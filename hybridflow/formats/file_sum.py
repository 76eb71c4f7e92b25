"""Whether a file has changed since it was written: by the size, and by the CRC-32 of the bytes. Without torch."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
