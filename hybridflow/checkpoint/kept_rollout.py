"""The responses of the iteration that is under way, beside the checkpoints (checkpoint.save_rollout)."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import DataError, RecordError
from hybridflow.formats.directories import sync
from hybridflow.parallel.agreement import failures
from hybridflow.recording.run_dir import dump_batch

Read = TypeVar("Read")  # what a reader makes of a file


def write_rollout(
    directory: Path, iteration: int, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, *, writes: bool
) -> str | None:
    """Remove the saved rollout and write this one; return why that failed, or None. Collective.

    writes: True on the first rank alone.
    """
    failure = None
    if writes:
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            file = dump_batch(directory, f"iteration_{iteration:06d}", tensors)
            sync(file)
            sync(file.parent)
        except (OSError, RecordError) as error:
            failure = f"{directory}: {error}"
    found = failures(failure, group)
    if not found:
        return None
    return f"the responses of iteration {iteration} cannot be kept (checkpoint.save_rollout): {found[0]}"


def read_rollout(
    directory: Path, iteration: int, read: Callable[[Path], Read], group: dist.ProcessGroup
) -> Read | None:
    """What `read` makes of the file; None where there is none, or a rank cannot read it. Collective."""
    file, found = directory / "batches" / f"iteration_{iteration:06d}.safetensors", list[Read]()
    with contextlib.suppress(DataError, OSError):
        found.append(read(file))
    usable = torch.tensor(len(found))
    dist.all_reduce(usable, op=dist.ReduceOp.MIN, group=group)
    return found[0] if usable else None
