"""Results that some ranks need and others only add to, on four ranks.

torchrun --nproc-per-node 4 -m tests.parallel.exchange_worker OUT
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Contribution, Exchange

SIZE = 6
PATIENCE = timedelta(seconds=60)


def main(out: Path) -> None:
    platform = platforms.start(seed=0)
    exchange, rank = Exchange(dist.group.WORLD, platform.device), platform.rank
    exchange.wholes_on((0, 2), [contribution(rank, 0)])  # connections are made, groups too
    dist.barrier(group=dist.group.WORLD)
    store, rounds = dist.distributed_c10d._get_default_store(), []
    if rank in (0, 2):  # those who need the result come when the others have gone on: if these waited, nobody would end
        store.wait(["gone/1", "gone/3"], PATIENCE)
    for number in (1, 2, 3):
        whole = exchange.wholes_on((0, 2), [contribution(rank, number), Contribution.nothing(2, (1,))])
        rounds.append(None if whole is None else [x.tolist() for x in whole])
    store.set(f"gone/{rank}", "")
    everywhere = exchange.whole(contribution(rank, 9)).tolist()
    found: list[object] = [None] * platform.world_size
    dist.all_gather_object(found, {"rounds": rounds, "everywhere": everywhere})
    if rank == 0:
        out.write_text(json.dumps(found))
    platforms.stop()


def contribution(rank: int, number: int) -> Contribution:
    """Ranks 1 and 2 know two entries each, the others nothing."""
    if rank not in (1, 2):
        return Contribution.nothing(SIZE, (1, 2))
    return Contribution(SIZE, torch.tensor([rank, rank + 2]), torch.tensor([1.0, 0.5]) * rank + number, (1, 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
