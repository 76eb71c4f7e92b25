"""The other ranks as processes: who they are, whether they still run, and what ended them.

Ranks tell each other their host and pid once. From then on those of one host see in /proc how the others fare, without
their help: what is stopped or dead can say nothing. A pid may be given to another process, so the start time goes
with it (both are fields of /proc/PID/stat, see proc(5)).
"""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hybridflow.errors import EnvironmentProblem

FIELD_STATE, FIELD_START_TIME, FIELD_EXIT_CODE = 3, 22, 52  # of /proc/PID/stat
ENDED = ("Z", "X")  # a process whose parent has not asked about it yet, and one that is going away
NOT_RUNNING = {"T": "stopped", "t": "held by a debugger", "D": "in an uninterruptible wait"}


@dataclass(frozen=True)
class Peer:
    """A rank as a process."""

    rank: int
    host: str
    machine: str  # tells hosts apart that have one name, and containers that have pids of their own
    pid: int
    start_time: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Condition:
    """What /proc says of a process."""

    state: str | None  # the letter of ps; None where there is no such process any more
    signal: int | None = None  # that ended the process; known until the parent has asked
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.state is None or self.state in ENDED

    @property
    def cause(self) -> str:
        """How it ended, as far as that can be seen."""
        if self.signal:
            return f"killed by {signal_name(self.signal)}"
        return f"exit code {self.exit_code}" if self.exit_code is not None else "cause not seen from here"


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):  # a real-time signal has a number only
        return signal.Signals(number).name
    return f"signal {number}"


def this_process(rank: int) -> Peer:
    fields = _stat_fields(os.getpid())
    if fields is None:
        raise EnvironmentProblem(f"/proc/{os.getpid()}/stat: cannot be read; a run needs /proc to tell processes apart")
    return Peer(rank, socket.gethostname(), _machine(), os.getpid(), _number(fields, FIELD_START_TIME))


def parent_process() -> str:
    """Tells the process that started this one from all others: torchrun's agent, which starts ranks again."""
    fields = _stat_fields(os.getppid())
    return f"{_machine()} {os.getppid()} {_number(fields, FIELD_START_TIME) if fields else 0}"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text(encoding='utf-8').strip()} {os.readlink('/proc/self/ns/pid')}"


def is_running(machine: str, pid: int, start_time: int) -> bool | None:
    """Whether a process still runs. None: of another machine or container, whose processes are not seen from here."""
    try:
        if machine != _machine():
            return None
    except OSError:  # a computer without /proc
        return None
    return not condition(Peer(0, "", machine, pid, start_time)).ended


def condition(peer: Peer) -> Condition:
    """Of a process on this machine."""
    fields = _stat_fields(peer.pid)
    if fields is None or _number(fields, FIELD_START_TIME) != peer.start_time:
        return Condition(None)
    state = fields[FIELD_STATE - 1]
    if state not in ENDED or len(fields) < FIELD_EXIT_CODE:
        return Condition(state)
    status = _number(fields, FIELD_EXIT_CODE)  # as waitpid gives it
    return Condition(state, signal=status & 0x7F or None, exit_code=None if status & 0x7F else status >> 8)


def kill(peer: Peer) -> bool:
    """SIGKILL to a rank of this machine, if it still is that process. Whether it was sent."""
    if condition(peer).ended:
        return False
    try:
        os.kill(peer.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        return False
    return True


class Wake:
    """Sleep until a process of this machine ends: the exit code is visible only until torchrun asks for it."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._poll = select.poll()
        self._descriptors: list[int] = []
        for peer in peers:
            # an old kernel, a container that forbids it, a process just gone: the next look at /proc finds it
            with contextlib.suppress(OSError, AttributeError):
                self._descriptors.append(os.pidfd_open(peer.pid))
                self._poll.register(self._descriptors[-1], select.POLLIN)

    def sleep(self, seconds: float) -> None:
        for descriptor, _ in self._poll.poll(seconds * 1000):
            self._poll.unregister(descriptor)  # it stays readable

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def gather_peers(own: Peer, nonce: str, group: dist.ProcessGroup) -> tuple[list[Peer], str]:
    """Every rank's process, in order, and the nonce of rank 0. Collective over the group, which is the world's."""
    everyone: list[tuple[Peer, str]] = [(own, nonce)] * group.size()
    dist.all_gather_object(everyone, (own, nonce), group=group)
    return [peer for peer, _ in everyone], everyone[0][1]


def out_of_memory_kills() -> int | None:
    """How often the kernel has killed a process of this process's control group for memory; None: it does not say."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            events = Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events")
        elif controllers == "memory":
            events = Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.oom_control")
        else:
            continue
        with contextlib.suppress(OSError):  # not mounted here
            counts = dict(row.split() for row in events.read_text(encoding="utf-8").splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    before, _, after = text.rpartition(")")  # a process's name may have any letter
    return [*before.split(" (", 1), *after.split()]


def _number(fields: list[str], field: int) -> int:
    return int(fields[field - 1])
