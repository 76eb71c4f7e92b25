"""The process that has charge of those in which reward functions run, one for each rank: it watches and kills them.

    trainer  --- units --->  supervisor  --- a unit at a time --->  worker, worker, ...      (rewards/worker.py)
             <-- answers --          <-- the answer ----------

It imports no torch and runs no code of a user's; workers are forks. One that is over its time, holds too much
memory, has too many descendants, or ends, is killed with all that it has started, and another takes its place. When the
trainer is gone, however it went, the supervisor kills them all and ends. A unit has one answer, whatever happens.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridflow.parallel.child_processes import adopt_orphans, children, descendants, how, kill_tree, resident_bytes
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.messages import ChannelClosed, Header, MessageChannel
from hybridflow.rewards.row_owners import RowOwners
from hybridflow.rewards.worker import TOLD_TO_END, run_worker

BUSY_SECONDS, IDLE_SECONDS = 0.05, 0.5  # between two looks at processes: while calls run, and while none does
LOAD_SECONDS = 600.0  # that the import of a user's modules may take
PATIENCE = 2.0  # seconds beyond the limit in which an `async def` may end by itself
MOST_PRINTED = 4000  # characters kept of what is printed in a call
READS = 16  # at a time, of what a worker prints: one that prints without end must not keep limits from being kept
GIB = 1 << 30
ANOTHER = "another row that it called took too long"


@dataclass(frozen=True)
class Charge:
    """What a supervisor gets. path: the trainer's sys.path. memory_bytes: of a worker and the processes below it."""

    specs: tuple[FunctionSpec, ...]
    num_workers: int
    memory_bytes: int | None
    max_processes: int
    path: list[str]


@dataclass
class RowsOfCall:
    """The rows of one call. alone: it may be the one that has ended a worker with several calls under way.

    row: of an affine function, whose calls go to one worker; last: there are no further calls for the row. seconds:
    that this call may take; None: as the function says.
    """

    number: int
    function: int
    num_rows: int
    body: bytes
    row: int | None = None
    last: bool = False
    seconds: float | None = None
    started: float = 0.0
    alone: bool = False


@dataclass
class Worker:
    """functions: those that it may call. deadline: of the start."""

    pid: int
    channel: MessageChannel
    output: int | None  # what it prints; None once it has closed that
    functions: tuple[int, ...]
    capacity: int
    deadline: float
    ready: bool = False
    gone: bool = False  # the worker has closed the channel
    status: int | None = None  # once it has ended
    units: dict[int, RowsOfCall] = field(default_factory=dict)
    printed: str = ""

    @property
    def is_free(self) -> bool:
        alone = any(unit.alone for unit in self.units.values())
        return self.ready and len(self.units) < self.capacity and not alone


class Supervisor:
    """See the module. Errors of `run`: ChannelClosed, when the trainer is gone; then `end`."""

    def __init__(self, charge: Charge, trainer: MessageChannel, parent: int) -> None:
        self._charge, self._trainer, self._parent = charge, trainer, parent
        self._affine = any(spec.affine for spec in charge.specs)
        assert not self._affine or len(charge.specs) == 1, "an affine function has a pool of its own"
        self._queues: dict[int, deque[RowsOfCall]] = {number: deque() for number in range(len(charge.specs))}
        self._workers: list[Worker] = []
        self._rows: RowOwners[RowsOfCall] = RowOwners()  # whose calls are in no queue
        self._looked = 0.0

    def run(self) -> None:
        for functions in self._lanes():
            self._workers.append(self._started(functions))
        while True:
            self._wait()
            if os.getppid() != self._parent:
                raise ChannelClosed
            for header, body in self._trainer.receive():
                self._told(header, body)
            for worker in list(self._workers):
                self._hear(worker)
            self._look_in_turn()
            self._hand_out()
            self._trainer.flush()

    def end(self) -> None:
        """Kill all that there is; what parents leave behind becomes this process's."""
        while left := children(os.getpid()):
            for pid in left:
                kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.001)

    # ---- what arrives

    def _wait(self) -> None:
        readers: list[MessageChannel | int] = [self._trainer, *(w.channel for w in self._workers if not w.gone)]
        readers += [worker.output for worker in self._workers if worker.output is not None]
        writers = [x for x in (self._trainer, *(worker.channel for worker in self._workers)) if x.has_more]
        busy = any(worker.units or not worker.ready for worker in self._workers)
        _poll(readers, writers, BUSY_SECONDS if busy else IDLE_SECONDS)
        for worker in self._workers:
            if worker.channel.has_more:
                with contextlib.suppress(ChannelClosed):
                    worker.channel.flush()

    def _told(self, header: Header, body: bytes) -> None:
        if "withdraw" in header:
            asked = set(header["withdraw"])
            gone = [unit.number for queue in self._queues.values() for unit in queue if unit.number in asked]
            for number, queue in self._queues.items():
                self._queues[number] = deque(unit for unit in queue if unit.number not in asked)
            self._trainer.send({"withdrawn": gone})
            return
        row, last = header.get("row"), header.get("last", False)
        unit = RowsOfCall(
            header["unit"], header["function"], header["rows"], body, row, last=last, seconds=header.get("seconds")
        )
        lost = self._rows.why_lost(row)
        if lost is not None:
            self._answer_lost(unit, lost)
        elif self._affine:
            self._rows.add(unit)
        else:
            self._queues[unit.function].append(unit)

    def _hear(self, worker: Worker) -> None:
        try:
            for header, _ in worker.channel.receive():
                if "ready" in header:
                    worker.ready = True
                elif (unit := worker.units.pop(header["unit"], None)) is not None:
                    self._read_output(worker)
                    self._answer(worker, unit, header)
                    self._forget_ended_row(unit)
        except ChannelClosed:
            worker.gone = True
        self._read_output(worker)

    def _read_output(self, worker: Worker) -> None:
        if worker.output is None:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS):
                data = os.read(worker.output, 1 << 16)
                if not data:
                    self._close_output(worker)
                    return
                worker.printed = (worker.printed + data.decode(errors="backslashreplace"))[-4 * MOST_PRINTED :]

    def _close_output(self, worker: Worker) -> None:
        if worker.output is not None:
            os.close(worker.output)
            worker.output = None

    def _reap(self) -> None:
        """Take note of workers that have ended, and of what their descendants left behind."""
        own = {worker.pid: worker for worker in self._workers}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in own:
                    own[ended[0]].status = ended[1]
        for pid in children(os.getpid()):
            if pid not in own:
                kill_tree(pid)

    # ---- what is done about it

    def _look_in_turn(self) -> None:
        """Not with each message: a look costs more than a short call."""
        if time.monotonic() < self._looked + BUSY_SECONDS and not any(worker.gone for worker in self._workers):
            return
        self._reap()
        for worker in list(self._workers):
            self._look(worker)
        self._start_missing()
        self._looked = time.monotonic()

    def _look(self, worker: Worker) -> None:
        """Replace a worker that has ended, or must."""
        if worker.gone and worker.status is None:
            worker.status = _soon(worker.pid)
        if worker.status is not None:
            self._lose(worker, f"the process that called it {how(os.waitstatus_to_exitcode(worker.status))}")
        elif worker.gone:
            self._lose(worker, "it has closed the socket that its results go through")
        elif not worker.ready and time.monotonic() > worker.deadline:
            self._lose(worker, f"its module was not imported in {LOAD_SECONDS:g} s")
        elif any(self._is_late(unit) for unit in worker.units.values()):
            self._lose(worker, None)
        elif (excess := self._excess(worker)) is not None:
            self._lose(worker, excess)

    def _is_late(self, unit: RowsOfCall) -> bool:
        spec = self._charge.specs[unit.function]
        limit = unit.seconds or spec.timeout_seconds * unit.num_rows
        limit += PATIENCE if spec.awaited else 0.0
        return time.monotonic() > unit.started + limit

    def _excess(self, worker: Worker) -> str | None:
        """What it has too much of."""
        below, most = descendants(worker.pid), self._charge.memory_bytes
        if len(below) > self._charge.max_processes:
            return f"it had started {len(below)} processes; reward.max_processes = {self._charge.max_processes}"
        if most is not None and (held := resident_bytes([worker.pid, *below])) > most:
            return f"its processes held {held / GIB:.2f} GiB; reward.memory_gib = {most / GIB:g}"
        return None

    def _lose(self, worker: Worker, why: str | None) -> None:
        """why: None where it was too slow."""
        if worker.status is None:
            kill_tree(worker.pid)
            os.waitpid(worker.pid, 0)
        self._hear(worker)  # what it has sent before counts
        worker.channel.close()
        self._close_output(worker)
        self._workers.remove(worker)
        units = list(worker.units.values())
        for unit in self._rows.lose(worker.pid, why or ANOTHER):
            self._answer_lost(unit, why or ANOTHER)
        if not worker.ready and not units:  # it could not even start: whoever waits must know
            units = self._first_queued(worker)
        for unit in units:
            self._answer_unfinished(worker, unit, why, of_many=len(units) > 1)

    def _answer_lost(self, unit: RowsOfCall, why: str) -> None:
        """A call of a row whose worker is gone."""
        self._trainer.send({"unit": unit.number, "ended": why, "seconds": 0.0, "printed": ""})
        self._forget_ended_row(unit)

    def _forget_ended_row(self, unit: RowsOfCall) -> None:
        if unit.last and unit.row is not None:
            self._rows.forget(unit.row)

    def _answer_unfinished(self, worker: Worker, unit: RowsOfCall, why: str | None, *, of_many: bool) -> None:
        seconds = time.monotonic() - unit.started if unit.started else 0.0
        if of_many and unit.row is None:  # one that blocks the event loop makes all late; nobody knows which it is
            unit.alone = True
            self._queues[unit.function].appendleft(unit)
        elif why is None and (unit.row is None or self._is_late(unit)):
            self._answer(worker, unit, {"unit": unit.number, "timeout": True, "seconds": seconds})
        else:
            self._answer(worker, unit, {"unit": unit.number, "ended": why or ANOTHER, "seconds": seconds})
        self._forget_ended_row(unit)

    def _first_queued(self, worker: Worker) -> list[RowsOfCall]:
        if self._affine:
            first = self._rows.pop_first()
            return [] if first is None else [first]
        queue = next((self._queues[number] for number in worker.functions if self._queues[number]), None)
        return [] if queue is None else [queue.popleft()]

    def _answer(self, worker: Worker, unit: RowsOfCall, answer: Header) -> None:
        printed, worker.printed = worker.printed, ""
        if len(printed) > MOST_PRINTED:
            printed = f"...{printed[-MOST_PRINTED:]}"
        self._trainer.send(answer | {"printed": printed})

    # ---- workers

    def _lanes(self) -> list[tuple[int, ...]]:
        """The functions of each worker that there is to be: one for each `async def`, num_workers for all others.

        An `async def` that is affine has num_workers too.
        """
        specs, many = self._charge.specs, self._charge.num_workers
        plain = tuple(number for number, spec in enumerate(specs) if not spec.awaited)
        lanes = [plain] * many if plain else []
        awaited = [(number, many if spec.affine else 1) for number, spec in enumerate(specs) if spec.awaited]
        return lanes + [(number,) for number, count in awaited for _ in range(count)]

    def _start_missing(self) -> None:
        """In the place of workers that have ended, once there is something to do for them."""
        there = [worker.functions for worker in self._workers]
        for functions in self._lanes():
            if functions in there:
                there.remove(functions)
            elif self._rows.has_calls() or any(self._queues[number] for number in functions):
                self._workers.append(self._started(functions))

    def _started(self, functions: tuple[int, ...]) -> Worker:
        charge, own = self._charge, os.getpid()
        near, far = socket.socketpair()
        output, written = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                run_worker(
                    far,
                    written,
                    {number: charge.specs[number] for number in functions},
                    supervisor=own,
                    path=charge.path,
                    memory_bytes=charge.memory_bytes,
                )
            finally:
                os._exit(1)
        far.close()
        os.close(written)
        os.set_blocking(output, False)
        capacity = max(charge.specs[number].concurrency if charge.specs[number].awaited else 1 for number in functions)
        return Worker(pid, MessageChannel(near), output, functions, capacity, deadline=time.monotonic() + LOAD_SECONDS)

    def _hand_out(self) -> None:
        """To workers that are free, in the order in which units came; of several functions in turn."""
        for worker in self._workers:
            while worker.is_free and (unit := self._next_for(worker)) is not None:
                unit.started = time.monotonic()
                worker.units[unit.number] = unit
                with contextlib.suppress(ChannelClosed):
                    worker.channel.send({"unit": unit.number, "function": unit.function}, unit.body)

    def _next_for(self, worker: Worker) -> RowsOfCall | None:
        if self._affine:
            return self._rows.assign_call(worker.pid, [other.pid for other in self._workers])
        queues = [self._queues[number] for number in worker.functions if self._queues[number]]
        if not queues:
            return None
        queue = min(queues, key=lambda queue: queue[0].number)
        if queue[0].alone and worker.units:
            return None
        return queue.popleft()


def _poll(readers: Sequence[MessageChannel | int], writers: Sequence[MessageChannel], seconds: float) -> None:
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    for writer in writers:
        poll.register(writer, select.POLLIN | select.POLLOUT)
    with contextlib.suppress(InterruptedError):
        poll.poll(1000 * seconds)


def _soon(pid: int) -> int | None:
    """How the process has ended, whose files close a moment before; None if it goes on without them."""
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    return None


def main(descriptor: int, parent: int) -> None:
    """Of `python -c`, as `rewards.pool` starts it: a socket to the trainer, over which the charge comes first."""
    for number in TOLD_TO_END:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    trainer = MessageChannel(socket.socket(fileno=descriptor))
    supervisor: Supervisor | None = None
    with contextlib.suppress(ChannelClosed):
        charge: Charge | None = None
        while charge is None:
            trainer.wait()
            for _, body in trainer.receive():
                charge = pickle.loads(body)
                break
        supervisor = Supervisor(charge, trainer, parent)
        supervisor.run()
    if supervisor is not None:
        supervisor.end()
    sys.exit(0)
