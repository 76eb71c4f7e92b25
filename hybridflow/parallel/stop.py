"""The wish, from outside, that the run end: by SIGTERM of torchrun or a user, SIGUSR1 of a scheduler, SIGHUP of a tty.

    stop = StopRequest(grace_seconds=300)
    stop.listen()                 # Watchdog.start does: until then there is nothing to save, and a signal ends at once
    ...
    if stop.agreed(group):        # at a place where the run can be saved: the same answer on every rank
        save()
        watchdog.close()          # disarms
        leave(ExitStatus.STOPPED)

A Python handler runs when the main thread comes back to Python, which inside a collective it may not. So the signal is
noted by the interpreter's C handler (`signal.set_wakeup_fd`) and read by a thread. SIGINT stays Python's own.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

import torch
import torch.distributed as dist

from hybridflow.errors import ExitStatus
from hybridflow.parallel.process_exit import in_time, leave, say

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# torchrun forwards what it gets, a scheduler or a terminal signals all processes at once: one wish comes twice
SECOND_SIGNAL_AFTER = 1.0  # seconds


class StopRequest:
    """Of this rank. With no `signals` it listens to none, and nobody asks.

    `requested` is the name of the first signal. Another one, a second later or more, ends the process at once with
    NOT_SAVED, and so does the end of `grace_seconds` since the first. `announce` is called before: it tells the peers.
    """

    def __init__(self, grace_seconds: float, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        self.requested: str | None = None
        self.announce: Callable[[], object] = lambda: None  # may block for a few seconds
        self._grace_seconds = grace_seconds
        self._signals = frozenset(signals)
        self._first: float | None = None  # time.monotonic
        self._armed = True

    def listen(self) -> None:
        """Notice signals from now on; in the main thread. Before that each has the default action.

        A signal that this process was started to ignore stays so: whoever sends SIGUSR1 to all processes of a job
        (Slurm, through launch/slurm.sbatch) has SIGTERM sent to the ranks, and the wish must not come twice.
        """
        self._signals = frozenset(sign for sign in self._signals if signal.getsignal(sign) != signal.SIG_IGN)
        if not self._signals:
            return
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for sign in self._signals:
            signal.signal(sign, _noted)
        threading.Thread(target=self._wait, name="hybridflow stop", daemon=True).start()

    def agreed(self, group: dist.ProcessGroup, also: bool = False) -> bool:
        """Whether any rank got a signal, or says `also`: alike on all. Collective; the group must take CPU tensors."""
        asked = torch.tensor([int(self.requested is not None or also)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
        return bool(asked)

    def ask(self, why: str) -> None:
        """The run is to end, as if a signal had come to this rank."""
        self.requested = self.requested or why

    def disarm(self) -> None:
        """Neither a signal nor the end of the grace changes the exit status from now on: the run ends anyway.

        Where one rank has ended, torchrun signals the others.
        """
        self._armed = False

    def _wait(self) -> None:
        while True:
            readable, _, _ = select.select([self._read], [], [], self._seconds_left())
            for number in os.read(self._read, 64) if readable else b"":
                if number in self._signals:  # SIGINT passes here too
                    self._on_signal(signal.Signals(number).name)
            if self._armed and self._seconds_left() == 0:
                self._end(f"{self.requested} came {self._grace_seconds:g} s ago (checkpoint.grace_seconds)")

    def _on_signal(self, name: str) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self.requested = now, name
            in_time(lambda: logging.getLogger(__name__).info("told to end by %s", name))
        elif self._armed and now - self._first >= SECOND_SIGNAL_AFTER:
            self._end(f"a second signal, {name}, after {self.requested}")

    def _seconds_left(self) -> float | None:
        """None where nothing runs out."""
        if self._first is None or not self._armed:
            return None
        return max(0.0, self._first + self._grace_seconds - time.monotonic())

    def _end(self, reason: str) -> None:
        self.announce()
        say(f"hybridflow: pid {os.getpid()}: {reason}: ends at once, without a new checkpoint")
        leave(ExitStatus.NOT_SAVED)


def _noted(number: int, frame: FrameType | None) -> None:
    """Without a handler in Python the signal's default action ends the process. The thread does the rest."""
