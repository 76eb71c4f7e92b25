"""What this process asks of process groups, call by call, in a file: for `hybridflow.parallel.collective_order`.

    HYBRIDFLOW_RECORD_COLLECTIVES=DIR hybridflow train mine.yaml        # DIR/rank_N.jsonl, of the last start

A line is a group, before its first call, or a call, before it is made. `hybridflow.parallel.collectives` hands on every
call that passes through a process group of several ranks. Not seen are NCCL calls that vLLM makes by itself on GPUs.
"""

import inspect
import json
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.errors import EnvironmentProblem

RECORD_VARIABLE = "HYBRIDFLOW_RECORD_COLLECTIVES"
MOST_FRAMES = 6  # between a send and the batch that it is of
OWN_INPUT = ("gather",)  # whose first argument is there on one rank alone
AUTOGRAD = "Dummy-"  # how Python names threads that it has not started


class CollectiveRecord:
    """Errors: EnvironmentProblem where the file cannot be made; OSError, later, where the disk is full."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / f"rank_{rank}.jsonl").open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"{RECORD_VARIABLE} = {directory}: {error.strerror}") from error
        self._lock = threading.Lock()
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, list[int]]] = weakref.WeakKeyDictionary()
        self._names: Counter[str] = Counter()
        self._batch = 0

    def note(self, group: dist.ProcessGroup, operation: str, args: tuple[Any, ...], *, point_to_point: bool) -> None:
        with self._lock:
            name, ranks = self._groups.get(group) or self._new(group)
            if len(ranks) < 2:
                return
            call: dict[str, Any] = {"thread": _thread(), "group": name, "operation": operation.strip("_")}
            call |= _message(args[1 if operation in OWN_INPUT else 0 :])
            if point_to_point:
                call |= {"peer": ranks[args[1]] if operation != "recv_anysource" else None, "batch": self._batch_here()}
            elif (root := getattr(args[-1] if args else None, "rootRank", None)) is not None:
                call["root"] = ranks[root]
            self._write(call)

    def _new(self, group: dist.ProcessGroup) -> tuple[str, list[int]]:
        """A group that torch does not list has no ranks that others know."""
        listed = group in dist.distributed_c10d._world.pg_map
        name, ranks = str(group.group_name), dist.get_process_group_ranks(group) if listed else []
        self._names[name] += 1
        if self._names[name] > 1:  # a world that was made anew counts its groups from 0 again
            name = f"{name} ({self._names[name]})"
        self._groups[group] = name, ranks
        if len(ranks) > 1:
            description = "" if group.group_desc == "undefined" else group.group_desc
            self._write({"name": name, "ranks": ranks, "description": description})
        return name, ranks

    def _batch_here(self) -> int | None:
        """The number of the `batch_isend_irecv` that this call is of."""
        batch = _frame_of(inspect.unwrap(dist.batch_isend_irecv).__code__)
        if batch is None:
            return None
        self._batch += batch.f_locals["p2p_op"] is batch.f_locals["p2p_op_list"][0]
        return self._batch

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _thread() -> str:
    """That of Python. Autograd's threads count as the main one, which waits for them."""
    name = threading.current_thread().name
    return threading.main_thread().name if name.startswith(AUTOGRAD) else name


def _message(args: tuple[Any, ...]) -> dict[str, Any]:
    """Of the first argument: the first tensor, and the elements of all."""
    tensors = list(_tensors(args[0])) if args else []
    if not tensors:
        return {}
    first = tensors[0]
    kind = {"dtype": str(first.dtype).removeprefix("torch."), "device": first.device.type}
    return {"shape": list(first.shape), "elements": sum(x.numel() for x in tensors), **kind}


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, list):
        return [x for each in argument for x in _tensors(each)]
    return [argument] if isinstance(argument, torch.Tensor) else []


def _frame_of(code: object) -> FrameType | None:
    """The nearest call of it that this call is within."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MOST_FRAMES):
        if frame is None or frame.f_code is code:
            return frame
        frame = frame.f_back
    return None
