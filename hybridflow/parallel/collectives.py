"""What this process last asked of each process group, and how long it has waited: for a report of a hang, which must
say who waits for whom, and for the metrics (`WaitingTime`).

Every collective that Python starts (torch.distributed, megatron, vLLM) calls a method of
`torch._C._distributed_c10d.ProcessGroup`. Those methods are replaced, in this place alone, by ones that note the call
first: torch itself keeps no record of gloo's collectives, and NCCL's flight recorder is none of a process that is stuck
in Python. As seen in torch 2.13.0. A note costs a microsecond or two, gloo's smallest collective fifty.

Not seen: what does not pass through a process group, as vLLM's shared-memory collectives between ranks of one CPU.

A rank that is late waits less than the others, by as much as it is late: differences of the seconds waited name the
rank that the others waited for. Messages in host memory hold up the host, whose clock counts. Those of a device hold
up a stream: two events of the stream stand around each collective, and no host waits for them.
"""

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.parallel.collective_record import CollectiveRecord
from hybridflow.parallel.ranks import shown
from hybridflow.parallel.versions import check_version

# What all ranks of a group call alike, so that the number of calls can be compared, ...
COLLECTIVES = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "barrier",
)
POINT_TO_POINT = ("send", "recv", "recv_anysource")  # ... and what two of them do


@dataclass(slots=True)
class GroupCalls:
    """This process's calls of one group. `number` counts the collectives, point-to-point calls are not among them."""

    group: "weakref.ref[dist.ProcessGroup]"
    number: int = 0
    operation: str = ""
    began: float = 0.0  # time.monotonic
    nbytes: int = 0
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    peer: int | None = None  # in the group, of a send or a receive
    calling: bool = False  # the call has not returned
    began_on_device: torch.cuda.Event | None = None  # of a call whose stream waits at once
    on_device: bool = False  # the messages lie in a device's memory
    work: int = 0  # id of what it returned
    waiting: bool = False  # in the call's `wait`
    over: bool = False  # the call's `wait` has returned

    @property
    def inside(self) -> bool:
        """Whether the process is stuck in this call, as far as Python can see."""
        return self.calling or self.waiting


@dataclass(frozen=True)
class LastCall:
    """What a rank tells the others about one group."""

    group: str
    ranks: tuple[int, ...]
    number: int
    operation: str
    seconds_ago: float
    tensor: str  # dtype, shape and bytes of the first one
    peer: int | None  # rank of the world
    inside: bool
    over: bool

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        state = "inside it" if self.inside else "returned" if self.over else "started, not waited for"
        return (
            f"{self.operation}{peer} {self.tensor}, {self.number} collectives of group {self.group}, "
            f"{self.seconds_ago:.1f} s ago: {state}"
        )


class Collectives:
    """The record of this process, by group. One per process, from the first `install` on."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupCalls] = {}  # by the id of the group; a reference would keep the group alive
        self._latest: GroupCalls | None = None
        self.waiting = WaitingTime()
        self._record: CollectiveRecord | None = None

    @staticmethod
    def install() -> "Collectives":
        """The record of this process, which begins with the first call.

        Call it before process groups are made, on all ranks alike. Errors: EnvironmentProblem in another torch.
        """
        check_version("torch", torch.__version__)
        installed = getattr(dist.ProcessGroup.allreduce, "record", None)
        if isinstance(installed, Collectives):
            return installed
        record = Collectives()
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, record._noted(getattr(dist.ProcessGroup, name), name, 1))
        for name in POINT_TO_POINT:
            setattr(dist.ProcessGroup, name, record._noted(getattr(dist.ProcessGroup, name), name, 0))
        setattr(dist.Work, "wait", record._noted_wait(dist.Work.wait))  # noqa: B010
        return record

    def record_to(self, directory: Path, rank: int) -> None:
        """From now on every call is written there. Errors: EnvironmentProblem where nothing can be."""
        if self._record is None or self._record.directory != directory:
            self._record = CollectiveRecord(directory, rank)

    def last_calls(self) -> list[LastCall]:
        """The last call of each group, the latest first."""
        groups = [calls for calls in list(self._groups.values()) if calls.operation]
        groups.sort(key=lambda calls: -calls.began)
        found = [_last_call(calls) for calls in groups]
        return [call for call in found if call is not None]

    def _noted(self, method: Callable[..., Any], name: str, counts: int) -> Callable[..., Any]:
        point_to_point = not counts

        @functools.wraps(method)
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls = self._groups.get(id(group)) or self._new(group)
            calls.operation, calls.began = name, time.monotonic()
            calls.number += counts
            calls.peer = args[1] if point_to_point and len(args) > 1 and isinstance(args[1], int) else None
            tensor = args[0] if args else None
            while type(tensor) is list:
                tensor = tensor[0] if tensor else None
            if isinstance(tensor, torch.Tensor):
                calls.dtype, calls.shape, calls.nbytes = tensor.dtype, tensor.shape, tensor.nbytes
                calls.on_device = tensor.device.type == "cuda"
            else:
                calls.dtype, calls.shape, calls.nbytes, calls.on_device = None, (), 0, False
            if calls.on_device:  # a call that returns at once is waited for later: `wait` marks where
                calls.began_on_device = None if _returns_at_once(args) else self.waiting.mark()
            calls.waiting, calls.over, calls.calling = False, False, True
            self._latest = calls
            if self._record is not None:
                self._record.note(group, name, args, point_to_point=point_to_point)
            try:
                work = method(group, *args, **kwargs)
            finally:
                calls.calling = False
            calls.work = id(work)
            return work

        call.record = self  # type: ignore[attr-defined]
        return call

    def _noted_wait(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            calls = self._latest
            if calls is None or calls.work != id(work):  # an earlier one, of this group or another
                calls = next((each for each in self._groups.values() if each.work == id(work)), None)
            on_device = calls is not None and calls.on_device
            began = time.perf_counter()
            held_up = (calls.began_on_device or self.waiting.mark()) if calls is not None and on_device else None
            if calls is not None:
                calls.waiting = True
            try:
                return method(work, *args, **kwargs)
            finally:
                if on_device:
                    self.waiting.add_since(held_up)
                else:
                    self.waiting.add(time.perf_counter() - began)
                if calls is not None and calls.work == id(work):
                    calls.waiting, calls.over, calls.work, calls.began_on_device = False, True, 0, None

        return wait

    def _new(self, group: dist.ProcessGroup) -> GroupCalls:
        key = id(group)
        calls = GroupCalls(weakref.ref(group, lambda _: self._groups.pop(key, None)))
        self._groups[key] = calls
        return calls


def _returns_at_once(args: tuple[Any, ...]) -> bool:
    """Whether whoever called computes on while messages travel: `async_op`, and all sends and receives."""
    return bool(getattr(args[-1], "asyncOp", True)) if args else True


def _last_call(calls: GroupCalls) -> LastCall | None:
    """None where the group has ended, or is not of the world's."""
    group = calls.group()
    if group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group)) if group in dist.distributed_c10d._world.pg_map else ()
    tensor = f"{list(calls.shape)} of {calls.dtype} ({calls.nbytes} bytes)" if calls.dtype else ""
    description = "" if group.group_desc == "undefined" else f"{group.group_desc}, "
    peer = calls.peer if calls.peer is None or not ranks else ranks[calls.peer]
    return LastCall(
        group=f"{group.group_name} ({description}ranks {shown(ranks)})",
        ranks=ranks,
        number=calls.number,
        operation=calls.operation.strip("_"),
        seconds_ago=time.monotonic() - calls.began,
        tensor=tensor,
        peer=peer,
        inside=calls.inside,
        over=calls.over,
    )


MOST_PENDING = 1024  # pairs of events, beyond which those that have passed are read before the phase is over


class WaitingTime:
    """Of the thread that makes this object: another thread, as that of a checkpoint's writer, holds up no training."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._thread = threading.get_ident()
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    def add(self, seconds: float) -> None:
        """The host has waited for so long."""
        if threading.get_ident() == self._thread:
            self._seconds += seconds

    def mark(self) -> torch.cuda.Event | None:
        """An event of the stream, here; None while a graph is captured, which would capture the event, too."""
        if torch.cuda.is_current_stream_capturing() or threading.get_ident() != self._thread:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_since(self, began: torch.cuda.Event | None) -> None:
        """The stream was held up from `began` to here."""
        ended = self.mark() if began is not None else None
        if began is None or ended is None:
            return
        self._pending.append((began, ended))
        if len(self._pending) > MOST_PENDING:
            self._read(all_of_them=False)

    def seconds(self) -> float:
        """So far. The device must have done what it was given."""
        self._read(all_of_them=True)
        return self._seconds

    def _read(self, *, all_of_them: bool) -> None:
        while self._pending and (all_of_them or self._pending[0][1].query()):
            began, ended = self._pending.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3  # milliseconds
            self._free += (began, ended)
