"""Whole runs with the collectives that CUDA would have, as far as a CPU can make them; and a swap of two groups.

torchrun --nproc-per-node 8 -m tests.distributed.order_worker RECORDS {"name": [CONFIG, "section.key=value", ...], ...}

Gradients and parameters travel while ranks compute, weights of the hand-off travel by messages, and flat buffers by
torch's own collectives. RECORDS/NAME has the calls of each run.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.config import ExperimentConfig
from hybridflow.cpu import peer_memory
from hybridflow.cpu.megatron import overlays
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.collective_record import RECORD_VARIABLE
from hybridflow.roles.base import RunContext
from hybridflow.trainers import online

GROUPS = {"first": [0, 1, 2, 3], "second": [2, 3, 4, 5]}


def main(records: Path, runs: dict[str, list[str]]) -> None:
    peer_memory.can_read = lambda introduction: False
    overlays.all_gather_into_tensor = dist.all_gather_into_tensor
    overlays.reduce_scatter_tensor = dist.reduce_scatter_tensor
    online.RunContext = functools.partial(RunContext, overlap=True)
    os.environ[RECORD_VARIABLE] = str(records / "swapped")
    swapped(platforms.start(seed=0).rank)
    for name, (config, *overrides) in runs.items():
        os.environ[RECORD_VARIABLE] = str(records / name)
        trainer = online.OnlineTrainer(ExperimentConfig.from_yaml(config, [*overrides, f"name={name}"]))
        trainer.fit()
        if trainer.generator.engine is not None:
            trainer.generator.engine.close()
    platforms.stop()


def swapped(rank: int) -> None:
    """Rank 3 enters two groups the other way round. All ranks come through: gloo's groups have threads of their own."""
    made = [(dist.new_group(ranks, group_desc=name), ranks) for name, ranks in GROUPS.items()]
    own = [group for group, ranks in (reversed(made) if rank == 3 else made) if rank in ranks]
    for work in [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in own]:
        work.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
