"""tools.convert where one rank fails: reading a tensor, or writing what it has read.

torchrun --nproc-per-node N -m tests.tools.convert.failing_worker RANK ARGUMENT ...
"""

import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.weight_files import MegatronDirectory
from hybridflow.cli.convert import main
from hybridflow.convert import output
from hybridflow.convert.processes import Processes
from hybridflow.errors import CheckpointError
from hybridflow.formats.safetensors_files import SafetensorsDirectory

failing = int(sys.argv[1])


def fail(self: object, name: str, *where: object) -> Tensor:
    if dist.get_rank() == failing:
        raise CheckpointError(f"{name}: the disk is on fire")
    return originals[type(self)](self, name, *where)


def barrier(processes: Processes) -> None:
    """The others go on a moment later, when the one has removed the directory but not said why."""
    meet(processes)
    if dist.get_rank() != failing:
        time.sleep(0.2)


def remove(directory: Path) -> None:
    remove_at_once(directory)
    if dist.get_rank() == failing:
        time.sleep(0.4)


meet, remove_at_once = Processes.barrier, output._remove
Processes.barrier, output._remove = barrier, remove
originals = {kind: kind.read for kind in (SafetensorsDirectory, MegatronDirectory)}
SafetensorsDirectory.read = MegatronDirectory.read = fail
sys.exit(main(sys.argv[2:]))
