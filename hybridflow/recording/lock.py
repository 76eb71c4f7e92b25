"""The lock of a run's directory, OUTPUT_DIR/.NAME.lock: one process at a time writes runs/NAME.

    lock = RunLock(run_dir)
    lock.take()                 # rank 0, before it reads or writes there
    lock.check()                # before each row and each checkpoint
    lock.release()

The lock lies beside the directory, which moves away where a run starts anew. It names rank 0's process. A process of
this machine is looked up in /proc: boot, namespace of pids, pid and start time tell it from all others. Of another
machine nothing is seen from here, so a holder renews the lock's time every few seconds. A lock that stays silent for
SILENCE_SECONDS is stale. Only the file system's clock is read. A holder that was taken for gone ends at the next check.
"""

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridflow.errors import RunDirError, RunTakenError
from hybridflow.parallel.peer_processes import is_running, this_process
from hybridflow.recording.starts import own_command

SIGN_SECONDS = 5.0  # between two signs of the holder
SILENCE_SECONDS = 60.0
RESTART_SECONDS = 300.0  # that restarted ranks give those before them to end
POLL_SECONDS = 0.5
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Rank 0 of a run as a process. began: when it took the lock, in seconds since 1970."""

    machine: str
    pid: int
    start_time: int
    host: str
    began: float
    command: str

    @classmethod
    def here(cls) -> "Holder":
        own = this_process(0)
        host, began = socket.gethostname(), time.time()
        return cls(own.machine, own.pid, own.start_time, host, began, command=own_command())

    def is_same_process(self, other: "Holder") -> bool:
        return (self.machine, self.pid, self.start_time) == (other.machine, other.pid, other.start_time)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.began))
        return f"pid {self.pid} on {self.host} since {since} ({self.command})"


@dataclass(frozen=True)
class _Seen:
    """A lock at some moment. holder: None where the text is none of ours, or is not written yet."""

    holder: Holder | None
    changed: int  # st_mtime_ns

    def __str__(self) -> str:
        return "an unknown process" if self.holder is None else str(self.holder)


class RunLock:
    """Of one run directory, for the run's rank 0. Only tests give other seconds."""

    def __init__(self, run_dir: Path, *, sign: float = SIGN_SECONDS, silence: float = SILENCE_SECONDS) -> None:
        self.file = run_dir.with_name(f".{run_dir.name}.lock")
        self._run_dir, self._sign, self._silence = run_dir, sign, silence
        self._own = Holder.here()
        self._made: list[Path] = []  # directories for the lock
        self._released = threading.Event()
        self._is_held = False

    def take(self, *, patience: float = 0.0) -> None:
        """The directory is this process's until `release`. A lock that this process has already is left alone.

        patience: seconds in which a holder that runs may still end. Errors: RunDirError where a process holds the lock.
        """
        give_up = time.monotonic() + patience
        while not self._created():
            seen = self._seen_written()
            if seen is None:  # released just now
                continue
            if seen.holder is not None and seen.holder.is_same_process(self._own):
                return
            if not self._runs(seen):
                self._replace()
                break
            if time.monotonic() >= give_up:
                raise RunDirError(self._refusal(self._seen() or seen))
            time.sleep(POLL_SECONDS)
        self._is_held = True
        threading.Thread(target=self._give_signs, name="hybridflow lock", daemon=True).start()

    def check(self) -> None:
        """Errors: RunTakenError where another process has the lock by now. A lock that somebody removed is renewed."""
        seen = None
        with contextlib.suppress(OSError):  # a file system that does not answer says nothing of another process
            seen = self._seen()
            if seen is None and self._is_held:
                self._created()
        if seen is not None and seen.holder is not None and not seen.holder.is_same_process(self._own):
            raise RunTakenError(
                f"{self._run_dir}: {seen} has taken this directory ({self.file}): this process had given no sign for "
                f"{self._silence:g} s. It ends, and writes nothing more there"
            )

    def release(self) -> None:
        """The directory is nobody's, unless another process has it."""
        if not self._is_held:
            return
        self._is_held = False
        self._released.set()
        with contextlib.suppress(OSError):
            seen = self._seen()
            if seen is not None and seen.holder == self._own:
                self.file.unlink()
            for directory in reversed(self._made):
                directory.rmdir()

    # ---- inside

    def _created(self) -> bool:
        """Whether there was no lock, and now is this process's. Errors: RunDirError."""
        directory = self.file.parent
        made = [path for path in reversed((directory, *directory.parents)) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        self._made += made
        try:
            with self.file.open("xb") as file:
                file.write(self._text())
        except FileExistsError:
            return False
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.unlink()
            raise RunDirError(f"{self.file}: cannot be written: {error.strerror}") from error
        return True

    def _replace(self) -> None:
        """Of processes that do this at once the last has the lock, and the others see that at their first check."""
        with tempfile.NamedTemporaryFile(dir=self.file.parent, prefix=f"{self.file.name}.", delete=False) as file:
            file.write(self._text())
        os.replace(file.name, self.file)
        time.sleep(POLL_SECONDS)
        self.check()

    def _text(self) -> bytes:
        return json.dumps(asdict(self._own)).encode() + b"\n"

    def _seen(self) -> _Seen | None:
        """None where there is no lock. Opening a file makes a shared file system ask the server."""
        try:
            with self.file.open("rb") as file:
                text, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None
        with contextlib.suppress(ValueError, TypeError):
            return _Seen(Holder(**json.loads(text)), changed)
        return _Seen(None, changed)

    def _seen_written(self) -> _Seen | None:
        """A lock file exists a moment before the file has a text."""
        seen = self._seen()
        if seen is None or seen.holder is not None:
            return seen
        time.sleep(POLL_SECONDS)
        return self._seen()

    def _runs(self, seen: _Seen) -> bool:
        """Whether the holder runs. Waits until a holder on another machine gives a sign, or stays silent."""
        holder = seen.holder
        known = None if holder is None else is_running(holder.machine, holder.pid, holder.start_time)
        if known is not None:
            return known
        if self._age(seen) >= self._silence:
            return False
        LOG.warning(
            "%s is held by %s, which this machine does not see: this start waits up to %g s for a sign of it",
            *(self.file, seen, self._silence),
        )
        until = time.monotonic() + self._silence
        while time.monotonic() < until:
            time.sleep(min(POLL_SECONDS, self._sign))
            if self._seen() != seen:  # a sign, another holder, or none
                return True
        return False

    def _age(self, seen: _Seen) -> float:
        """Seconds since the lock changed, by the clock that gives files their times."""
        with tempfile.NamedTemporaryFile(dir=self.file.parent, prefix=f"{self.file.name}.") as probe:
            return (os.fstat(probe.fileno()).st_mtime_ns - seen.changed) / 1e9

    def _refusal(self, seen: _Seen) -> str:
        return (
            f"{self._run_dir}: is in use by {seen}: one process at a time trains in a run's directory. Wait for its "
            f"end, or start another run with another name (name=...); the lock is {self.file}"
        )

    def _give_signs(self) -> None:
        while not self._released.wait(self._sign):
            with contextlib.suppress(OSError):  # a file system that comes back, or a lock that was removed
                seen = self._seen()
                if seen is not None and seen.holder == self._own:
                    os.utime(self.file)
