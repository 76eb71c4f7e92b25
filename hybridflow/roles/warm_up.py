"""The first message of every process group. NCCL makes a communicator then, which takes memory of each rank's GPU.

Made before the KV cache is sized, communicators take nothing from what the cache was promised, and a link that is
broken is named before the engine compiles for minutes.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from hybridflow.models.pipeline import meet_neighbours
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.margin import GROUP, communicators
from hybridflow.placement.placed import PlacedModels


def warm_up(
    run: PlacedModels,
    groups: ProcessGroups,
    device: torch.device,
    engine_pipelines: Iterable[dist.ProcessGroup] = (),
) -> None:
    """Use each group once that the plan counts: those that torch has made. Collective over the world.

    engine_pipelines: vLLM's, each in the order of its stages.
    """
    for ranks in dict.fromkeys(ranks for whose, ranks, _ in communicators(run) if whose == GROUP):
        group = groups.made(ranks)
        if group is not None and len(ranks) > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    wraps = dict[tuple[int, ...], bool]()
    for model in run.models.values():
        for ranks in model.layout.groups("pp") if model.layout.pp > 1 else ():
            wraps[ranks] = wraps.get(ranks, False) or model.layout.vpp > 1
    pipelines = [(groups.made(ranks), around) for ranks, around in wraps.items()]
    for group, around in [*pipelines, *((group, False) for group in engine_pipelines)]:
        if group is not None:
            meet_neighbours(group, device, wraps=around)
