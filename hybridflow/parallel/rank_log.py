"""One log file a rank, runs/NAME/logs/rank_N.log, by Python's `logging`.

    with rank_log(run_dir / "logs"):
        open_rank_log()                       # when the run directory is this run's
        logging.getLogger(__name__).info("...")

The files have what happens from level info on, warnings of libraries, and the traceback of every error, also of ranks
that do not speak on the screen. HYBRIDFLOW_LOG=debug adds the seconds of every stage. It also says from which level on
the ranks write to stderr, each line with the rank; without it from warning on.
"""

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hybridflow.errors import EnvironmentProblem, Stopped, UserError
from hybridflow.parallel.torchrun import host_name, torchrun_rank

VARIABLE = "HYBRIDFLOW_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
IN_FILES_ALONE = {"shown": True}  # `extra` of a record whose text is on the screen already
MOST_WAITING = 10_000  # records before the file is open


class _File(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that has become full is not an error of the run."""


class _RankFile(logging.Handler):
    """The file of this rank. Until `open` records wait: an earlier run may still lie in the directory."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(LEVELS["debug"])
        self._path = directory / f"rank_{rank}.log"
        self._file: _File | None = None
        self._waiting: list[logging.LogRecord] = []
        self._lost = False
        self._process = os.getpid()
        self.error: BaseException | None = None

    def open(self) -> None:
        """What has waited is written. A file that cannot be written to is reported once, and the run goes on."""
        with self.lock or contextlib.nullcontext():
            if self._file is not None or self._lost:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _File(self._path, encoding="utf-8", errors="backslashreplace")
                self._file.setFormatter(self.formatter)
            except OSError as error:
                self._lost = True
                print(f"hybridflow: warning: no log: {self._path}: {error.strerror}", file=sys.stderr, flush=True)
            waiting, self._waiting = self._waiting, []
            for record in waiting:
                self.emit(record)

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is not None:
            self._file.emit(record)
        elif not self._lost and len(self._waiting) < MOST_WAITING:
            self._waiting.append(record)

    def close(self) -> None:
        """A run that has ended before it had a directory leaves a log, unless a user's error alone has ended it."""
        ours = self._process == os.getpid()  # not of a process that was forked off
        if ours and not isinstance(self.error, UserError) and any(x.levelno >= logging.ERROR for x in self._waiting):
            self.open()
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk again: what it held back
                self._file.close()
        super().close()


class _Screen(logging.StreamHandler):  # type: ignore[type-arg]
    """stderr as it is when a record comes: a bar that is drawn there wraps it. Without what is on the screen."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(record, "shown", False) and bool(super().filter(record))


_current: list[_RankFile] = []  # of the process, one at most


@contextlib.contextmanager
def rank_log(directory: Path) -> Iterator[None]:
    """Within the block the process logs as this rank. Errors: EnvironmentProblem for an unknown level."""
    level = os.environ.get(VARIABLE, "").lower()
    if level and level not in LEVELS:
        raise EnvironmentProblem(f"{VARIABLE} = {os.environ[VARIABLE]!r}: must be {', '.join(LEVELS)}")
    rank, world_size = torchrun_rank()
    form = f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
    file = _RankFile(directory, rank)
    root, own = logging.getLogger(), logging.getLogger("hybridflow")
    former, handlers = own.level, (file, _Screen(LEVELS[level or "warning"]))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(form))
        root.addHandler(handler)
    own.setLevel(min(LEVELS[level or "info"], logging.INFO))
    _current[:] = [file]
    own.info("rank %d of %d on %s, process %d: %s", rank, world_size, host_name(), os.getpid(), shlex.join(sys.argv))
    try:
        yield
    except Stopped as stopped:
        own.info("stopped %s", stopped, extra=IN_FILES_ALONE)
        raise
    except BaseException as error:
        log_error(error)
        raise
    else:
        own.info("finished")
    finally:
        _current.clear()
        own.setLevel(former)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def open_rank_log() -> None:
    """From now on records go into the file. Where this process logs nothing, nothing happens."""
    for file in _current:
        file.open()


def log_error(error: BaseException) -> None:
    """The error with the traceback, once, in the file alone: on the screen one rank speaks for all."""
    for file in _current:
        if file.error is not error:
            file.error = error
            logging.getLogger("hybridflow").error("ends with an error", exc_info=error, extra=IN_FILES_ALONE)
