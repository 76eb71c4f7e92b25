"""stdout and stderr of a run: it goes on where they cannot be written any more. The encoding of all text.

A pipe may lose the reader, a terminal may close, and the disk under a redirected stdout may be full. None of these is
worth an iteration: what is shown there is in the log files of the ranks, too.
"""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, cast

LOG = logging.getLogger(__name__)
IN_FILES_ALONE = {"shown": True}  # as hybridflow.parallel.rank_log has it, which loads torch
DESCRIPTORS = (0, 1, 2)


class _KeptStream:
    """A stream whose failures the log tells once; later failures are ignored."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._reported = stream, name, False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._tell(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._tell(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _tell(self, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            LOG.warning("%s cannot be written: %s; the run continues", self._name, error.strerror, extra=IN_FILES_ALONE)


def escape_letters() -> None:
    """A letter that the terminal's encoding lacks is shown as an escape, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def speak_utf8() -> None:
    """Texts, names of files and child processes are UTF-8, whatever the locale says; the terminal's encoding stays.

    Python decides so at its start alone, so a command in another locale begins anew.
    """
    escape_letters()
    if sys.getfilesystemencoding() == "utf-8" or not _is_command(Path(sys.argv[0])):
        return
    os.environ.setdefault("PYTHONIOENCODING", f"{getattr(sys.stdout, 'encoding', 'utf-8')}:backslashreplace")
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _is_command(started: Path) -> bool:
    """Whether this process is a command of hybridflow, not a program that calls one."""
    package = Path(__file__).resolve().parents[1]
    own = {package, package.with_name("launch")}
    return started.name.startswith("hybridflow") or not own.isdisjoint(started.resolve().parents)


def keep_streams() -> None:
    """From now on no failure of stdout or stderr is an error of this process.

    A descriptor that is closed becomes /dev/null: else a file of the run would get the number, and with the number what
    libraries print.
    """
    for descriptor in DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")
        if not isinstance(stream, _KeptStream):
            setattr(sys, name, cast(TextIO, _KeptStream(stream, name)))
