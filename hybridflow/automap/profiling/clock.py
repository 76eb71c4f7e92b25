"""Seconds of a piece of work, repeated until they are worth something."""

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 3  # of which the median counts


def seconds_of(work: Callable[[], object], *, least: float = 0.03, device: torch.device | None = None) -> float:
    """Of one call, after one that does not count: the median of runs that take `least` seconds each."""
    synchronize = torch.cuda.synchronize if device is not None and device.type == "cuda" else _nothing
    work()
    synchronize()
    once = _timed(work, 1, synchronize)
    count = max(1, round(least / max(once, 1e-9)))
    return statistics.median(_timed(work, count, synchronize) for _ in range(REPEATS))


def _timed(work: Callable[[], object], count: int, synchronize: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    synchronize()
    return (time.perf_counter() - begin) / count


def _nothing() -> None:
    pass
