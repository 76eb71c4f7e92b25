"""What a rank can find out, when a run does not go on, of itself, of an error, and of the ranks beside it."""

import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.errors import OfAnotherRank, UserError
from hybridflow.parallel.peer_processes import NOT_RUNNING, Condition
from hybridflow.parallel.process_exit import in_time

# what gloo's and NCCL's errors say of a connection whose other end is gone
LOST = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "NCCL", "gloo/transport")


def lost_peer(error: BaseException) -> bool:
    """Whether an error may be that of a rank whose peer is gone: gloo, NCCL and the store raise RuntimeErrors."""
    if isinstance(error, OfAnotherRank):
        return True
    if isinstance(error, UserError):
        return False
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError):
            return True
        if isinstance(chain, RuntimeError) and any(text in str(chain) for text in LOST):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def python_stacks() -> str:
    """Of every thread of this process but those that watch it, the main one first."""
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: (thread is not main, thread.name))
    frames = sys._current_frames()
    lines = []
    for thread in threads:
        if thread.ident in frames and not thread.name.startswith("hybridflow "):
            lines += [f"  {thread.name}:\n", *traceback.format_stack(frames[thread.ident])]
    return "".join(lines)


def describe_state(found: Condition) -> str:
    """What this host can say of a rank that says nothing."""
    if found.ended:
        return f"is dead ({found.cause})"
    if found.state in NOT_RUNNING:
        return f"is {NOT_RUNNING[found.state]} (state {found.state})"
    return f"runs (state {found.state}), but its Python threads do not: native code keeps the interpreter's lock"


def dump_nccl_trace(directory: Path, rank: int) -> None:
    """NCCL's flight recorder, for torchfrtrace. There is one where torch is built for CUDA."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not torch.cuda.is_initialized():
        return

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"nccl_trace_rank_{rank}").write_bytes(dump())

    in_time(write)
