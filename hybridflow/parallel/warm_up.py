"""The first message of every process group. NCCL makes a communicator then, of 0.2 to 0.5 GiB on each rank.

Made before the KV cache is sized, they take nothing from what the cache was promised, and a link that is broken is
named before the engine compiles for minutes.
"""

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import _p2p_ops

from hybridflow.parallel.grid import ProcessGroups


def warm_up(groups: ProcessGroups, device: torch.device, *pipelines: dist.ProcessGroup) -> None:
    """Use all groups of several ranks once. Collective over the world, whose ranks have made them in one order.

    pipelines: of others than ours, each a group in the order of its stages.
    """
    for group in groups.of_several():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    for group, wraps in [*groups.own_pipelines(), *((group, False) for group in pipelines)]:
        _meet_neighbours(group, device, wraps=wraps)


def _meet_neighbours(group: dist.ProcessGroup, device: torch.device, *, wraps: bool) -> None:
    """By the groups and in the order of megatron's schedules: each two stages get a communicator of their own.

    wraps: the last stage sends to the first, as stages do that have several chunks of the model.
    """
    ranks, own, last = dist.get_process_group_ranks(group), group.rank(), group.size() - 1
    before, after = own > 0 or wraps, own < last or wraps
    sent, received = (torch.zeros(1, device=device) for _ in range(2))
    requests = _p2p_ops(
        tensor_send_prev=sent if before else None,
        tensor_recv_prev=received if before else None,
        tensor_send_next=sent if after else None,
        tensor_recv_next=received.clone() if after else None,
        group=group,
        prev_pipeline_rank=ranks[own - 1],
        next_pipeline_rank=ranks[(own + 1) % len(ranks)],
    )
    for request in requests.values():
        request.wait()
