"""Clocks and counts: seconds of phases, memory of the process, whose bytes the engine's weights are."""

import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

LOG = logging.getLogger(__name__)


class Stopwatch:
    """Seconds spent in named phases.

        watch = Stopwatch(torch.cuda.synchronize)
        with watch.phase("rollout"):
            ...
        watch.seconds["rollout"]

    `synchronize` is called on the way in and out, so that work queued on a device counts for the phase that
    queued it.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or _nothing
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `seconds[name]`. Phases may nest; each phase counts the whole block."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        LOG.debug("%s: %.3f s", name, seconds)

    def reset(self) -> None:
        self.seconds = {}


def peak_rss_mb() -> float:
    """The most memory that this process has held resident so far, in MB of 2**20 bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**10  # kB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, kB elsewhere


def own_bytes(engine: Iterable[Tensor], trainer: Iterable[Tensor]) -> int:
    """Bytes of the engine's parameters that do not lie in the trainer's memory."""
    held = {x.untyped_storage().data_ptr() for x in trainer}
    outside = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in engine}
    return sum(storage.nbytes() for pointer, storage in outside.items() if pointer not in held)


def _nothing() -> None:
    pass
