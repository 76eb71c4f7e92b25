"""What ranks would write of real actors and critics: for tests/placement/test_saving.py.

python -m tests.placement.saving_worker MODELS OUT, on four ranks
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.checkpoint.sharded import prepare_save
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.policy import Actor
from hybridflow.roles.values import Critic
from tests.placement.test_saving import BUCKET_BYTES, CASES, placed


def main(models: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    found: dict[str, Any] = {}
    for case in CASES:
        run = placed(models, case)
        roles = (Actor(run.actor, temperature=1.0, world=world), Critic(run.models["critic"], world=world))
        for role in roles:
            directory = out / case.name / role.name
            directory.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            chunks = prepare_save(role, directory).chunks
            held = sum(torch.empty_like(chunk.read(), device="cpu").nbytes for chunk in chunks)
            found[f"{case.name}/{role.name}"] = [sum(chunk.num_bytes for chunk in chunks), held]
    every: list[Any] = [None] * platform.world_size
    dist.all_gather_object(every, found)
    if platform.rank == 0:
        (out / "found.json").write_text(json.dumps(every))
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
