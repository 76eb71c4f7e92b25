"""The output directory of a host: whether it can be written, how fast, and what is free."""

import errno
import os
import tempfile
import time
from pathlib import Path

from hybridflow.inspection.findings import Finding, gigabytes, rate

AREA = "storage"
BLOCK_BYTES = 4 << 20
MOST_BYTES = 64 << 20
SECONDS = 2.0  # that writing may take, and one block more
LEAST_FREE = 1 << 30
LEAST_RATE = 20e6  # bytes a second: below it a checkpoint of a 1 B model takes more than ten minutes


def storage_findings(output_dir: str, host: str) -> list[Finding]:
    """Free space and write speed where `output_dir` lies, or will lie. What is written is removed again.

    A directory that is not there yet is not made: hosts with a common file system would remove it under each other.
    """
    directory = Path(output_dir).absolute()
    try:
        there = _existing(directory)
        status = os.statvfs(there)
        written, seconds = _write(there)
    except OSError as error:
        advice = f"make {directory} a directory that this user can write to on that host, or set output_dir"
        value = f"output_dir = {output_dir}: cannot write to {directory}: {error.strerror}"
        return [Finding(AREA, "output directory", host, value, "fail", advice=advice)]
    return [
        space_finding(status.f_bavail * status.f_frsize, there, host),
        speed_finding(written / seconds, there, host),
    ]


def _existing(directory: Path) -> Path:
    """The directory itself, or the nearest above it that is there. Errors: OSError where that is no directory."""
    there = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    return there


def _write(directory: Path) -> tuple[int, float]:
    """(bytes, seconds) of a file that is on the disk after each block. It is gone when this returns or raises."""
    block = os.urandom(BLOCK_BYTES)  # a file system that compresses gains nothing
    with tempfile.NamedTemporaryFile(prefix=".hybridflow.health.", dir=directory, buffering=0) as file:
        written, start = 0, time.perf_counter()
        while written < MOST_BYTES and time.perf_counter() - start < SECONDS:
            written += file.write(block)
            os.fsync(file.fileno())
        return written, time.perf_counter() - start


def space_finding(free: int, directory: Path, host: str) -> Finding:
    value, figures = f"{gigabytes(free)} free in {directory}", {"free_bytes": free}
    if free < LEAST_FREE:
        advice = f"less than {gigabytes(LEAST_FREE)}: remove old runs, or set output_dir to a larger disk"
        return Finding(AREA, "free space", host, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "free space", host, value, figures=figures)


def speed_finding(bytes_per_second: float, directory: Path, host: str) -> Finding:
    value, figures = f"{rate(bytes_per_second)} to {directory}", {"bytes_per_second": round(bytes_per_second)}
    if bytes_per_second < LEAST_RATE:
        advice = f"less than {rate(LEAST_RATE)}: saves will take long; set output_dir to a faster disk"
        return Finding(AREA, "write speed", host, value, "warn", advice=advice, figures=figures)
    return Finding(AREA, "write speed", host, value, figures=figures)
