"""Seconds that this rank waits in collectives: the others' lateness, and the transfer.

A rank that is late waits less than the others, by as much as it is late. The differences between ranks therefore name
the rank that the others waited for, in whatever collective they did: tensor-parallel sums, gradients, an exchange.

Messages in host memory hold up the host, whose clock counts. Those of a device hold up a stream: two events of the
stream stand around each collective, and are read when they have passed. No host waits for a device because of that.
"""

import threading
from collections import deque

import torch

MOST_PENDING = 1024  # pairs of events, beyond which those that have passed are read before the phase is over


class WaitingTime:
    """Of the thread that makes this object: another thread, as that of a checkpoint's writer, holds up no training."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._thread = threading.get_ident()
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    def add(self, seconds: float) -> None:
        """The host has waited for so long."""
        if threading.get_ident() == self._thread:
            self._seconds += seconds

    def mark(self) -> torch.cuda.Event | None:
        """An event of the stream, here; None while a graph is captured, which would capture the event, too."""
        if torch.cuda.is_current_stream_capturing() or threading.get_ident() != self._thread:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_since(self, began: torch.cuda.Event | None) -> None:
        """The stream was held up from `began` to here."""
        ended = self.mark() if began is not None else None
        if began is None or ended is None:
            return
        self._pending.append((began, ended))
        if len(self._pending) > MOST_PENDING:
            self._read(all_of_them=False)

    def seconds(self) -> float:
        """So far. The device must have done what it was given."""
        self._read(all_of_them=True)
        return self._seconds

    def _read(self, *, all_of_them: bool) -> None:
        while self._pending and (all_of_them or self._pending[0][1].query()):
            began, ended = self._pending.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3  # milliseconds
            self._free += (began, ended)
