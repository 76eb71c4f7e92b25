"""One start of torchrun on all hosts of a job, watched until it has ended on all of them."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from hybridflow.launcher.connection import Connection, Message, Team
from hybridflow.launcher.experiment import Experiment
from hybridflow.launcher.output import Output, say

END_SECONDS = 12.0  # from the first failure until what still runs is killed
SECOND_SIGNAL_AFTER = 1.0  # seconds: a terminal and a scheduler may send one wish twice
STOP_MARGIN = 15.0  # seconds beyond the grace period, in which the ranks end themselves
# as torch 2.13's multiprocessing/api.py says it when a rank ends, before it ends the others
RANK_ENDED = re.compile(r"failed \(exitcode: (-?[0-9]+)\) local_rank: ([0-9]+) \(pid: ([0-9]+)\)")
ERROR = "hybridflow: error: "  # how a rank begins what is wrong
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STOPPED, NOT_SAVED = 75, 76  # exit statuses of ranks that end on request: docs/guides/checkpoints.md
MEANINGS = {70: "a rank was stuck", STOPPED: "stopped as told, saved", NOT_SAVED: "stopped as told, not saved"}


@dataclass(frozen=True)
class Failure:
    """What ended a run early, as far as is seen from here. status: 1 to 255."""

    connection: Connection
    rank: int | None
    status: int
    reason: str

    @property
    def is_stop(self) -> bool:
        return self.status in (STOPPED, NOT_SAVED)

    def __str__(self) -> str:
        who = f"{self.connection.host}: " + (f"rank {self.rank} " if self.rank is not None else "")
        return f"{who}{self.reason}"


class Attempt:
    """starts: what to ask of each host (`start` of node.py). offsets: the first rank of each host."""

    def __init__(
        self,
        team: Team,
        starts: Mapping[Connection, Message],
        offsets: Mapping[Connection, int],
        output: Output,
        grace: float,
    ) -> None:
        self._team, self._starts, self._offsets, self._output, self._grace = team, starts, offsets, output, grace
        self._running = set(starts)
        self._failure: Failure | None = None
        self._deadline: float | None = None  # time.monotonic, after which everything is killed
        self._signals: list[tuple[int, float]] = []
        self._in_error = False
        self.errors: dict[str, None] = {}  # what ranks have said of a user's error, each line once
        self.was_stopped = False

    def run(self) -> Failure | None:
        """None where every rank has ended with status 0. Meanwhile the first of STOP_SIGNALS goes on to the ranks."""
        before = {number: signal.signal(number, self._note) for number in _heeded()}
        suspended = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the other hosts would go on, and find it lost
        try:
            for connection, request in self._starts.items():
                connection.send(**request)
            while self._running:
                for connection, message in self._team.next_events(0.2):
                    self._take(connection, message)
                self._obey()
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._kill()
        finally:
            signal.signal(signal.SIGTSTP, suspended)
            for number, handler in before.items():  # a second wish that comes when all has ended changes no status
                signal.signal(number, signal.SIG_IGN if self.was_stopped else handler)
        return self._failure

    def _take(self, connection: Connection, message: Message) -> None:
        for stream in ("out", "err"):
            if stream in message:
                self._output.line(connection.host.name, stream, message[stream])
                if stream == "err":
                    self._note_error(message[stream])
                ended = RANK_ENDED.search(message[stream]) if stream == "err" else None
                if ended:
                    self._rank_ended(connection, int(ended[1]), int(ended[2]))
        if "ended" in message:
            self._running.discard(connection)
            self._torchrun_ended(connection, message["ended"], message["left"])
        elif "error" in message:
            self._running.discard(connection)
            self._fail(Failure(connection, None, 1, f"torchrun cannot be started: {message['error']}"))
        elif "closed" in message:
            self._running.discard(connection)
            self._lose(connection, message["closed"])

    def _note_error(self, line: str) -> None:
        """Lines of code belong to the error that they follow."""
        self._in_error = line.startswith(ERROR) or (self._in_error and line.startswith("    "))
        if self._in_error:
            self.errors[line] = None

    def _rank_ended(self, connection: Connection, exitcode: int, local_rank: int) -> None:
        rank = self._offsets[connection] + local_rank
        self._fail(Failure(connection, rank, *_status_and_reason(exitcode)))

    def _torchrun_ended(self, connection: Connection, status: int | None, left: list[int]) -> None:
        if left:
            say(f"{connection.host}: cannot be killed: processes {', '.join(map(str, left))}", error=True)
        if status:
            code, reason = _status_and_reason(status)
            self._fail(Failure(connection, None, code, f"torchrun {reason}"))

    def _lose(self, connection: Connection, why: str) -> None:
        """A host that is gone is the cause, also where ranks elsewhere were faster to say that they miss it."""
        if self._failure is None or self._failure.connection.lost is None:
            self._failure = Failure(connection, None, 1, f"lost: {why}")
        self._begin_to_end()

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            say(f"{failure}: the others are ended", error=True)
        self._begin_to_end()

    def _begin_to_end(self) -> None:
        """What still runs has so long to say what it knows."""
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + END_SECONDS)

    def _kill(self) -> None:
        self._deadline = None
        for connection in self._running:
            connection.send(do="kill")

    # ---- signals

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signals or now - self._signals[-1][1] >= SECOND_SIGNAL_AFTER:
            self._signals.append((number, now))

    def _obey(self) -> None:
        """The first signal is a wish that the run end, the second that it end now."""
        while self._signals and not self.was_stopped:
            self.was_stopped = True
            name = signal.Signals(self._signals[0][0]).name
            say(f"{name}: the ranks save and end, in {self._grace:g} s at most; once more, and they end at once")
            self._tell_ranks(self._grace + STOP_MARGIN)
        if len(self._signals) > 1:
            self._signals = self._signals[:1]
            say("once more: the ranks end at once")
            self._tell_ranks(5.0)

    def _tell_ranks(self, seconds: float) -> None:
        """They have so long."""
        for connection in self._running:
            connection.send(do="signal", number=int(signal.SIGTERM))
        self._deadline = time.monotonic() + seconds


def _heeded() -> list[signal.Signals]:
    """Not SIGUSR1 where the launcher was started to ignore it: launch/slurm.sbatch makes one SIGTERM of it."""
    return [each for each in STOP_SIGNALS if each != signal.SIGUSR1 or signal.getsignal(each) != signal.SIG_IGN]


def _status_and_reason(exitcode: int) -> tuple[int, str]:
    """The exit status of a shell, and how a process ended. exitcode: of Python's Popen, negative for a signal."""
    if exitcode >= 0:
        meaning = f" ({MEANINGS[exitcode]})" if exitcode in MEANINGS else ""
        return exitcode, f"ended with status {exitcode}{meaning}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        name = f"signal {-exitcode}"
    return 128 - exitcode, f"was killed by {name}"


def run_attempt(
    team: Team,
    starts: Mapping[Connection, Message],
    offsets: Mapping[Connection, int],
    experiment: Experiment,
    *,
    stays: bool,
) -> tuple[Failure | None, bool]:
    """One attempt with output: what ended the attempt early, and whether a signal asked for the end.

    The last lines name host and rank, and the host's log, and say once more what a rank has said of a user's error:
    torchrun has printed much behind that.
    """
    output = Output([connection.host for connection in starts], experiment.run_dir, stays=stays)
    attempt = Attempt(team, starts, offsets, output, experiment.grace_seconds)
    try:
        failure = attempt.run()
    finally:
        output.close()
    if failure is not None:
        log = output.path(failure.connection.host.name)
        say(f"{failure}{f'; its output: {log}' if log else ''}", error=True)
        for line in attempt.errors:
            print(line, file=sys.stderr, flush=True)
    return failure, attempt.was_stopped
