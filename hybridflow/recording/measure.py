"""Clocks and counts: seconds, waiting, operations and memory of phases, whose bytes the engine's weights are."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Self

from torch import Tensor

from hybridflow.architecture.flops import peak_flops
from hybridflow.parallel.collectives import Collectives
from hybridflow.parallel.device import device_name, named_range
from hybridflow.parallel.host_memory import peak_resident_bytes
from hybridflow.parallel.platform import Platform

LOG = logging.getLogger(__name__)


class Stopwatch:
    """What named phases took: seconds, seconds of waiting for other ranks, and operations of models.

        watch = Stopwatch(torch.cuda.synchronize)
        with watch.phase("rollout"):
            ...
        watch.seconds["rollout"]

    `synchronize` is called on the way in and out, so that work queued on a device counts for the phase that
    queued it. waiting: seconds of waiting so far. platform: whose memory is measured by stage, an outermost phase.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        *,
        waiting: Callable[[], float] | None = None,
        platform: Platform | None = None,
    ) -> None:
        self._synchronize, self._waiting, self._platform = synchronize or _nothing, waiting or _zero, platform
        self._open: list[str] = []
        self._other_waits = self._most_resident = 0.0
        self.reset()

    @classmethod
    def for_platform(cls, platform: Platform) -> Self:
        """The watch of a run, which begins to count waiting."""
        return cls(platform.synchronize, waiting=Collectives.install().waiting.seconds, platform=platform)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `seconds[name]`. Phases may nest; each phase counts the whole block."""
        self._synchronize()
        start, waited = time.perf_counter(), self._waited()
        self._open.append(name)
        try:
            with named_range(name):
                yield
        finally:
            self._open.pop()
        self._synchronize()
        seconds = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.waited[name] = self.waited.get(name, 0.0) + self._waited() - waited
        LOG.debug("%s: %.3f s", name, seconds)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A phase whose most memory is kept, too."""
        if self._platform is not None:
            self._most_resident = self.most_resident_mb()
            self._platform.reset_peak_memory()
        with self.phase(name):
            yield
        if self._platform is not None:
            self.peaks_mb[name] = max(self.peaks_mb.get(name, 0.0), self._platform.peak_memory_bytes() / 2**20)

    def count(self, flops: float, dtype: str) -> None:
        """This rank does so many operations of a model in the phase that is open."""
        if self._open:
            peak, name = _peak_here(dtype), self._open[-1]
            self.flops[name] = self.flops.get(name, 0.0) + flops
            self.ideal_seconds[name] = self.ideal_seconds.get(name, 0.0) + (flops / peak if peak else 0.0)

    def wait(self, seconds: float) -> None:
        """This rank has waited for others for so long, outside any collective."""
        self._other_waits += seconds

    def most_resident_mb(self) -> float:
        """The most memory that this process has held resident so far, in MB of 2**20 bytes."""
        return max(self._most_resident, peak_rss_mb())

    def reset(self) -> None:
        self.seconds: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.flops: dict[str, float] = {}
        self.ideal_seconds: dict[str, float] = {}  # of the same operations at the peak of the device, where it is known
        self.peaks_mb: dict[str, float] = {}

    def _waited(self) -> float:
        return self._waiting() + self._other_waits


def peak_rss_mb() -> float:
    """The most memory that this process has held resident since the last reset, in MB of 2**20 bytes."""
    return peak_resident_bytes() / 2**20


@functools.cache
def _peak_here(dtype: str) -> float | None:
    return peak_flops(device_name(), dtype)


def own_bytes(engine: Iterable[Tensor], trainer: Iterable[Tensor]) -> int:
    """Bytes of the engine's parameters that do not lie in the trainer's memory."""
    held = {x.untyped_storage().data_ptr() for x in trainer}
    outside = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in engine}
    return sum(storage.nbytes() for pointer, storage in outside.items() if pointer not in held)


def _nothing() -> None:
    pass


def _zero() -> float:
    return 0.0
