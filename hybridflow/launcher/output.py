"""What the ranks print: on this terminal behind the host's name, and in runs/NAME/logs/HOST.log.

A new run moves an earlier run of the same name out of the way. So the logs lie beside the run's directory until the
directory is the new one, and are then moved inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from hybridflow.launcher.hostfile import LaunchHost

PREFIX = "launch: "  # of what the launcher says itself
LOOK_EVERY = 1.0  # seconds


def say(text: str, *, error: bool = False) -> None:
    """For the person who watches; a line each."""
    stream = sys.stderr if error else sys.stdout
    with contextlib.suppress(OSError):  # nobody reads it any more: the run goes on
        for line in text.splitlines():
            stream.write(f"{PREFIX}{line}\n")
        stream.flush()


class Output:
    """Of all hosts in one start. run_dir: where the logs go, if anywhere. stays: the run goes on in it."""

    def __init__(self, hosts: Iterable[LaunchHost], run_dir: Path | None, *, stays: bool) -> None:
        self._run_dir, self._files = run_dir, dict[str, IO[str]]()
        self._spool: Path | None = None
        self._looked = 0.0
        if run_dir is None:
            return
        self._before = _identity(run_dir)
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            self._spool = Path(tempfile.mkdtemp(prefix=f".{run_dir.name}.logs.", dir=run_dir.parent))
            self._files = {
                host.name: (self._spool / f"{host.name}.log").open("w", buffering=1, encoding="utf-8") for host in hosts
            }
        except OSError as error:
            say(f"warning: no logs: {error.filename}: {error.strerror}", error=True)
            return
        if stays:
            self._move()

    def line(self, host: str, stream: str, text: str) -> None:
        """stream: "out" or "err"."""
        shown = sys.stderr if stream == "err" else sys.stdout
        with contextlib.suppress(OSError):
            shown.write(f"{host}: {text}\n")
            shown.flush()
        if host in self._files:
            with contextlib.suppress(OSError):  # a full disk does not end a run that saves elsewhere
                self._files[host].write(f"{text}\n")
        if self._spool is not None and time.monotonic() - self._looked > LOOK_EVERY:
            self._looked = time.monotonic()
            assert self._run_dir is not None, "the logs have no other place"
            if _identity(self._run_dir) not in (None, self._before):
                self._move()

    def path(self, host: str) -> Path | None:
        """Of a host's log."""
        if host not in self._files:
            return None
        assert self._run_dir is not None, "the logs have no other place"
        return (self._spool or self._run_dir / "logs") / f"{host}.log"

    def close(self) -> None:
        """The logs are in the run's directory from now on, whether it has come to one or not."""
        if self._spool is not None:
            self._move()
        for file in self._files.values():
            file.close()

    def _move(self) -> None:
        """Into the run's directory, behind what an earlier start has left there."""
        assert self._spool is not None and self._run_dir is not None, "there are logs to move"
        logs, spool, self._spool = self._run_dir / "logs", self._spool, None
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            for host, file in self._files.items():
                target = logs / f"{host}.log"
                if not target.exists():
                    os.rename(spool / f"{host}.log", target)  # the file stays open
                    continue
                appended = target.open("a", buffering=1, encoding="utf-8")
                appended.write((spool / f"{host}.log").read_text(encoding="utf-8"))
                self._files[host] = appended
                file.close()
            shutil.rmtree(spool)


def _identity(run_dir: Path) -> tuple[int, int] | None:
    """Changes when a run begins: the run writes a config, or makes another directory."""
    try:
        status = (run_dir / "config.yaml").stat()
    except OSError:
        return None
    return status.st_ino, run_dir.stat().st_ino
