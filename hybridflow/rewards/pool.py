"""Calls of reward functions in other processes, as the trainer sees them: a unit goes, an outcome comes.

    pool = Pool(specs, PoolLimits(num_workers=4, memory_bytes=4 << 30, max_processes=64), rank=0)
    ticket = pool.submit(0, {"prompts": [...], "responses": [...], "columns": {...}, "rows": [3, 4]})
    pool.outcome(ticket).scores                     # waits for it

A supervisor (`rewards/supervisor.py`) is started by exec, not as a fork: neither torch's process groups nor CUDA nor
the trainer's memory are in it. It ends when this process does, or when `close` is called.
"""

import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.errors import RewardError
from hybridflow.parallel.child_processes import light_python
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.messages import ChannelClosed, Header, MessageChannel
from hybridflow.rewards.supervisor import Charge

Rows = Mapping[str, Any]  # prompts, responses, columns and rows, as `functions.Asked` has them
END_SECONDS = 10.0  # that a supervisor takes to kill what it has, at most


@dataclass(frozen=True)
class PoolLimits:
    """Of one rank. memory_bytes: of a worker together with all that it has started; None: as much as there is."""

    num_workers: int
    memory_bytes: int | None
    max_processes: int


@dataclass(frozen=True)
class Outcome:
    """Of a unit: scores, a tuple of parts for each row; or why there are none. printed: by the function.

    kind: error: the function raised or returned no score; ended: the process that called it.
    """

    kind: Literal["scored", "error", "timeout", "ended"]
    scores: tuple[tuple[float, ...], ...]
    problem: str
    seconds: float
    printed: str


@dataclass(frozen=True)
class Answer:
    """Of an affine function: a value, or why there is none. printed: by the function. lost: the process has ended."""

    value: Any
    problem: str
    seconds: float
    printed: str
    lost: bool = False


class Pool:
    """Of this rank. Units are called in the order of `submit`, as far as workers are free."""

    def __init__(self, specs: Sequence[FunctionSpec], limits: PoolLimits) -> None:
        self.specs = tuple(specs)
        self._next, self._rows = 0, dict[int, tuple[int, Rows]]()
        self._outcomes: dict[int, Outcome] = {}
        self._withdrawn: list[list[int]] = []
        self._called: dict[int, float] = {}  # seconds that a call may take, by ticket
        self._answers: dict[int, Answer] = {}
        near, far = socket.socketpair()
        process = _start(far)
        far.close()
        self._channel = MessageChannel(near)
        self.supervisor = process.pid
        self.close = weakref.finalize(self, _end, self._channel, process)
        charge = Charge(
            self.specs, limits.num_workers, limits.memory_bytes, limits.max_processes, [str(x) for x in sys.path]
        )
        self._send({"charge": True}, pickle.dumps(charge))

    def call(self, row: int, message: Mapping[str, Any], *, last: bool = False, seconds: float | None = None) -> int:
        """The ticket of a call of the affine function: after those of the same row, by the process that has it.

        last: there are no further calls for the row. seconds: that the call may take; None: as the function says.
        """
        ticket, self._next = self._next, self._next + 1
        self._called[ticket] = self.specs[0].timeout_seconds if seconds is None else seconds
        header = {"unit": ticket, "function": 0, "rows": 1, "row": row, "last": last, "seconds": seconds}
        self._send(header, pickle.dumps(dict(message)))
        return ticket

    def fileno(self) -> int:
        """Readable when an answer has arrived."""
        return self._channel.fileno()

    def answers(self, seconds: float | None) -> dict[int, Answer]:
        """Of affine functions, by ticket: those that have arrived; where there are none waits for some, so long."""
        if not self._answers and seconds != 0.0:
            self._channel.wait(seconds)
        self._take()
        found, self._answers = self._answers, {}
        return found

    def submit(self, function: int, rows: Rows) -> int:
        """The ticket of a unit: these rows in one call of the function of that number."""
        ticket, self._next = self._next, self._next + 1
        self._rows[ticket] = (function, rows)
        header = {"unit": ticket, "function": function, "rows": len(rows["rows"])}
        self._send(header, pickle.dumps(dict(rows)))
        return ticket

    def outcome(self, ticket: int) -> Outcome:
        """Waits for it; each can be had once. Errors: RewardError where there is no supervisor any more."""
        while ticket not in self._outcomes:
            self._receive()
        return self._outcomes.pop(ticket)

    def withdraw(self, tickets: Iterable[int]) -> set[int]:
        """Those of these units that no worker has begun; they have no outcome."""
        self._send({"withdraw": list(tickets)})
        while not self._withdrawn:
            self._receive()
        gone = set(self._withdrawn.pop())
        for ticket in gone:
            del self._rows[ticket]
        return gone

    def forget(self, tickets: Iterable[int]) -> None:
        """Nobody asks for their outcomes."""
        known = [ticket for ticket in tickets if ticket in self._rows or ticket in self._outcomes]
        for ticket in set(known) - self.withdraw(known):
            self.outcome(ticket)

    # ---- inside

    def _send(self, header: Header, body: bytes = b"") -> None:
        try:
            self._channel.send_all(header, body)
        except ChannelClosed:
            raise self._lost() from None

    def _receive(self) -> None:
        """Wait for messages, and take note of them."""
        self._channel.wait()
        self._take()

    def _take(self) -> None:
        try:
            for header, _ in self._channel.receive():
                if "withdrawn" in header:
                    self._withdrawn.append(header["withdrawn"])
                elif header["unit"] in self._called:
                    limit = self._called.pop(header["unit"])
                    self._answers[header["unit"]] = self._answer(header, limit)
                else:
                    self._outcomes[header["unit"]] = self._outcome(header)
        except ChannelClosed:
            raise self._lost() from None

    def _outcome(self, answer: Header) -> Outcome:
        function, rows = self._rows.pop(answer["unit"])
        spec, seconds, printed = self.specs[function], answer["seconds"], answer["printed"]
        if "scores" in answer:
            return Outcome("scored", tuple(tuple(row) for row in answer["scores"]), "", seconds, printed)
        if "error" in answer:
            return Outcome("error", (), answer["error"], seconds, printed)
        where, of = f"reward function {spec.path}: {_named(rows)}", _shown_first(rows)
        if "timeout" in answer:
            limit = f"reward.timeout_seconds = {spec.timeout_seconds:g}"
            each = f" for each of {len(rows['rows'])} rows" if len(rows["rows"]) > 1 else ""
            return Outcome("timeout", (), f"{where}: took longer than {limit}{each}; {of}", seconds, printed)
        return Outcome("ended", (), f"{where}: {answer['ended']}; {of}", seconds, printed)

    def _answer(self, told: Header, limit: float) -> Answer:
        """Of an affine function, whose messages name nothing but what has happened."""
        if "value" in told:
            return Answer(told["value"], "", told["seconds"], told["printed"])
        problem = told.get("error") or told.get("ended") or f"took longer than {limit:g} s"
        return Answer(None, problem, told["seconds"], told["printed"], lost="ended" in told)

    def _lost(self) -> RewardError:
        return RewardError(f"the process {self.supervisor}, which calls the functions of this rank, has been killed")


def _named(rows: Rows) -> str:
    numbers = rows["rows"]
    return f"row {numbers[0]}" if len(numbers) == 1 else f"rows {numbers[0]} to {numbers[-1]}"


def _shown_first(rows: Rows) -> str:
    """As in the messages of `rewards.functions`."""
    texts = [repr(rows[key][0]) for key in ("prompts", "responses")]
    prompt, response = (text if len(text) <= 200 else f"{text[:197]}..." for text in texts)
    return f"its prompt is {prompt}, the response {response}"


def _start(end: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        light_python("hybridflow.rewards.supervisor", end.fileno(), os.getpid()),
        stdin=subprocess.DEVNULL,
        pass_fds=[end.fileno()],
        start_new_session=True,
    )


def _end(channel: MessageChannel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.wait(END_SECONDS)
