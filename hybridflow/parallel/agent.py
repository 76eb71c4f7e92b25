"""Starts the ranks of one host and watches them, through the interface of torch.distributed that torchrun is made of.

    end = run_ranks(["-m", "hybridflow.train", "config.yaml"], 2, grace_seconds=300)
    end.status, end.message

The first rank to fail leaves its error in a file. The agent reads the file once, when all ranks are gone.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hybridflow.errors import ExitStatus
from hybridflow.parallel.child_processes import children

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SECOND_SIGNAL_AFTER = 1.0  # seconds: a terminal and a scheduler may send one wish twice
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class RanksEnd:
    """How the ranks have ended. status: of the command. message: what is wrong; None where the ranks have said it.

    by_rank: a rank has written the message.
    """

    status: int
    message: str | None = None
    by_rank: bool = False


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    grace_seconds: float,
    environment: Mapping[str, str] | None = None,
    debug: bool = False,
) -> RanksEnd:
    """Run `python ARGUMENTS` on so many ranks of this host until all have ended.

    SIGTERM, SIGUSR1 and Ctrl-C make the ranks save and end; once more, and they end at once; a third kills them.
    environment: of the ranks, beside this process's own. debug: with torch's messages about processes.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port: several runs share a host
        local_addr="127.0.0.1",  # a host's name may stand for an address that nobody reaches
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # this module forwards the others to the ranks
    )
    with _forward_signals(grace_seconds) as signals, _set_variables(environment or {}):
        try:
            elastic_launch(config, sys.executable)("-u", *_safe_path(), *arguments)
        except ChildFailedError as error:
            return _end(error.failures, signals)
    return RanksEnd(ExitStatus.FINISHED)


def _safe_path() -> list[str]:
    """A user's random.py in the working directory is not Python's. A checkout that is not installed is found there."""
    return [] if Path(__file__).parents[2] == Path.cwd() else ["-P"]


def follow_agent() -> None:
    """In a rank that `run_ranks` has started: a Ctrl-C is the agent's to tell, and the agent's death is a SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def write_error(file: str, text: str) -> bool:
    """As torch's agents read the error of a rank, and show it as the root cause. False where the disk takes nothing."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ signals


@dataclass
class _StopSignals:
    """The stop signals so far."""

    names: list[str]
    last: float = 0.0


@contextmanager
def _forward_signals(grace_seconds: float) -> Iterator[_StopSignals]:
    signals = _StopSignals([])

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signals.names and now - signals.last < SECOND_SIGNAL_AFTER:
            return
        signals.names.append(signal.Signals(number).name)
        signals.last = now
        kill = len(signals.names) > 2
        for pid in children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        if len(signals.names) == 1:
            print(
                f"\nhybridflow: {signals.names[0]}: the ranks save and end, in {grace_seconds:g} s at most; "
                "once more, and they end at once",
                file=sys.stderr,
                flush=True,
            )

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _set_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, which ranks inherit, within the block; what is set already stays."""
    new = [name for name in environment if name not in os.environ]
    os.environ.update({name: environment[name] for name in new})
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


# ------------------------------------------------------------------------------------------------ failures


def _end(failures: Mapping[int, Any], signals: _StopSignals) -> RanksEnd:
    """Of torch's ProcessFailures by rank: that with an error counts first, then what a signal killed.

    By SIGTERM the agent ends the others.
    """

    def order(rank: int) -> tuple[bool, int, int, int]:
        failure = failures[rank]
        kind = 2 if failure.exitcode == -signal.SIGTERM else int(failure.exitcode >= 0)
        return _text(failure) is None, kind, failure.timestamp, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    code, text = int(failure.exitcode), _text(failure)
    if signals.names and code in (-signal.SIGTERM, -signal.SIGKILL):
        return RanksEnd(ExitStatus.NOT_SAVED, f"stopped by {signals.names[-1]}: nothing new was saved")
    if code in (ExitStatus.STOPPED, ExitStatus.NOT_SAVED):
        return RanksEnd(code)
    if text is not None:
        return RanksEnd(code if code > 0 else ExitStatus.ERROR, text, by_rank=True)
    who = f"rank {rank} (pid {failure.pid})"
    if code == ExitStatus.HANG:
        return RanksEnd(code, f"{who} was stuck; the report is above")
    if code >= 0:
        return RanksEnd(code, f"{who} ended with status {code}; what it printed is above")
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = "; the kernel does so where memory runs out: see dmesg" if -code == signal.SIGKILL else ""
    return RanksEnd(128 - code, f"{who} was killed by {name}{hint}")


def _text(failure: Any) -> str | None:
    """What the rank has left in the rank's error file."""
    return str(failure.message["message"]) if isinstance(failure.message, dict) else None
