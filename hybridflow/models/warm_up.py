"""The first message of every process group. NCCL makes a communicator then, of 0.2 to 0.5 GiB on each rank.

Made before the KV cache is sized, they take nothing from what the cache was promised, and a link that is broken is
named before the engine compiles for minutes.
"""

import torch
import torch.distributed as dist

from hybridflow.models.pipeline import meet_neighbours
from hybridflow.parallel.grid import ProcessGroups


def warm_up(groups: ProcessGroups, device: torch.device, *pipelines: dist.ProcessGroup) -> None:
    """Use all groups of several ranks once. Collective over the world, whose ranks have made them in one order.

    pipelines: of others than ours, each a group in the order of its stages.
    """
    for group in groups.of_several():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    for group, wraps in [*groups.own_pipelines(), *((group, False) for group in pipelines)]:
        meet_neighbours(group, device, wraps=wraps)
