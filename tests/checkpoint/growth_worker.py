"""`python -m hybridflow.train` that counts what its ranks hold after some of its iterations.

python -m tests.checkpoint.growth_worker OUT ITERATION,... CONFIG [section.key=value ...]

OUT.RANK: by iteration, once its checkpoint is on the disk: see `held`. What is frozen is not searched: that is what
was there when the engine was built, and so before the first iteration; what is made later is not in it.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from hybridflow.checkpoint.manager import CheckpointManager
from hybridflow.cli.train import main
from hybridflow.models.memory import live_bytes


def held() -> dict[str, int]:
    """Of this process: tensors, bytes of their storages, resident bytes, threads, descriptors, objects in all."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return {
        "tensors": len(tensors),
        "tensor bytes": live_bytes(tensors),
        "resident": int(resident.split()[1]) * 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


def counting(out: str, iterations: set[int]) -> None:
    """Have `CheckpointManager.after_iteration` count."""
    after, found = CheckpointManager.after_iteration, dict[int, dict[str, int]]()

    def counted(self: CheckpointManager, state: Any, *arguments: Any, **named: Any) -> None:
        after(self, state, *arguments, **named)
        if state.iteration in iterations:
            self._saver.wait()
            found[state.iteration] = held()
            Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(found))

    CheckpointManager.after_iteration = counted


if __name__ == "__main__":
    counted_out, counted_iterations, *rest = sys.argv[1:]
    counting(counted_out, {int(iteration) for iteration in counted_iterations.split(",")})
    main(rest)
