"""What all ranks do with one run directory: a failure of one is known to all, and all see the same directory."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from hybridflow.errors import CheckpointError, RunDirError
from hybridflow.parallel.agreement import failures


def raise_together(act: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Do it on every rank. Collective. Errors: CheckpointError on all ranks where it has failed on any."""
    failure = None
    try:
        act()
    except (CheckpointError, RunDirError) as error:
        failure = str(error)
    except OSError as error:
        failure = f"{error.filename}: {error.strerror}"
    found = failures(failure, group)
    if found:
        raise CheckpointError("; ".join(found))


def check_shared(run_dir: Path, group: dist.ProcessGroup) -> None:
    """Collective. Errors: CheckpointError unless all ranks see one output directory."""
    name = [f".{run_dir.name}.{os.urandom(4).hex()}"]
    dist.broadcast_object_list(name, src=dist.get_process_group_ranks(group)[0], group=group)
    directory, is_first = run_dir.parent, group.rank() == 0
    probe = directory / name[0]

    def make() -> None:
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            probe.touch()

    def look() -> None:
        if not probe.exists():
            raise CheckpointError(
                f"output_dir = {str(directory)!r} on {socket.gethostname()} is not the directory that "
                f"rank 0 sees: checkpoints need one that all hosts share; checkpoint.save_interval=0 with "
                f"checkpoint.save_minutes=null saves none"
            )

    raise_together(make, group)
    raise_together(look, group)
    if is_first:
        probe.unlink()
