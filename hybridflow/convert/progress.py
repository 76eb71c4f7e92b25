"""What a person sees of a conversion: a bar of bytes on a terminal, elsewhere a line every tenth; at the end totals."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 1.0  # small models would print ten lines at once


class ByteProgress:
    """Counts this process's bytes towards the total of all processes, whose shares are about equal.

    console: None shows nothing, as on all processes but the first.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        console: Console | None,
        own: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._what, self._total, self._own = what, total, total if own is None else own
        self._console, self._clock = console, clock
        self._done, self._tenths, self._last_line = 0, 0, clock()
        self._started = clock()
        self._bar: RichProgress | None = None
        if console is not None and console.is_interactive:
            self._bar = RichProgress(
                TextColumn(what),
                BarColumn(bar_width=None),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(compact=True),
                console=console,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """This process has done `num_bytes` more."""
        self._done += num_bytes
        done = self._done * self._total // max(self._own, 1)
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._console is not None:
            self._line(done)

    def _line(self, done: int) -> None:
        tenths, now = 10 * done // max(self._total, 1), self._clock()
        if tenths > self._tenths and tenths < 10 and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._tenths, self._last_line = tenths, now
            remaining = (now - self._started) * (self._total - done) / done
            say(
                self._console,
                f"{self._what}: {10 * tenths} %, {size_text(done)} of {size_text(self._total)}, "
                f"{self._speed(done)}, {remaining:.0f} s left",
            )

    def totals(self) -> str:
        """`16.1 GB in 12.3 s (1.3 GB/s)`"""
        return f"{size_text(self._total)} in {self._clock() - self._started:.1f} s ({self._speed(self._total)})"

    def _speed(self, done: int) -> str:
        return f"{size_text(done / max(self._clock() - self._started, 1e-9))}/s"


def say(console: Console | None, text: str) -> None:
    """A line as it stands: no markup, no colours, no line breaks at the width of a terminal that is not there."""
    if console is not None:
        console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def size_text(num_bytes: float) -> str:
    """In powers of 1000, as disks and HuggingFace count."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"
