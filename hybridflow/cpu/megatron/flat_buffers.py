"""How megatron's flat buffers of gradients and parameters are exchanged on CPUs: read where they lie, where ranks can.

In place of torch's functions of the same names. gloo adds up all gradients on every rank to hand each a part, and
copies twice what it sends. Where a rank of the group cannot read in another's memory, as on another host, parts of
gradients go by an all-to-all. Either way a sum is that of the ranks in their order.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cpu import peer_memory
from hybridflow.cpu.peer_memory import PeerRectangle

CHUNK_BYTES = 1 << 19  # of a sum: stays in a core's cache

_processes: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]]" = weakref.WeakKeyDictionary()


def all_gather_into_tensor(output: Tensor, own: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> Any:
    """output: the `own` of all ranks in their order, contiguous; `own` may be this rank's part of it."""
    processes = () if async_op or group.size() == 1 else _readable(group)
    if not processes:
        return dist.all_gather_into_tensor(output, own, group=group, async_op=async_op)
    parts, rank = output.view(-1).chunk(len(processes)), group.rank()
    places = _tell(own.data_ptr(), group)
    for peer in _others(group):
        peer_memory.read(processes[peer], [PeerRectangle(places[peer], own.nbytes, parts[peer])])
    if parts[rank].data_ptr() != own.data_ptr():
        parts[rank].copy_(own.view(-1))
    dist.barrier(group)  # until then others read


def reduce_scatter_tensor(
    output: Tensor, whole: Tensor, *, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, async_op: bool
) -> Any:
    """output: of the sum of the ranks' `whole` this rank's part; it may be that part of `whole`. Contiguous."""
    if async_op or op != dist.ReduceOp.SUM or group.size() == 1:
        return dist.reduce_scatter_tensor(output, whole, op=op, group=group, async_op=async_op)
    processes, rank, parts = _readable(group), group.rank(), whole.view(-1).chunk(group.size())
    if not processes:
        gathered = torch.empty_like(whole).view(-1)
        dist.all_to_all_single(gathered, whole.view(-1), group=group)
        first, *others = gathered.chunk(group.size())
        for other in others:
            first += other
        output.view(-1).copy_(first)
        return None
    places = _tell(whole.data_ptr(), group)
    step = CHUNK_BYTES // whole.element_size()
    total, other = whole.new_empty(2, min(step, output.numel()))
    for start in range(0, output.numel(), step):
        count = min(step, output.numel() - start)
        for peer, process in enumerate(processes):
            into = (other if peer else total)[:count]
            if peer == rank:
                into.copy_(parts[rank][start : start + count])
            else:
                place = places[peer] + (rank * output.numel() + start) * whole.element_size()
                peer_memory.read(process, [PeerRectangle(place, into.nbytes, into)])
            if peer:
                total[:count] += into
        output.view(-1)[start : start + count] = total[:count]
    dist.barrier(group)
    return None


def _readable(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The processes of the ranks, if each can read in the memory of all; else none. Collective the first time."""
    if group not in _processes:
        own = peer_memory.introduction()
        introductions = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(introductions, own, group=group)
        everybody = all(peer_memory.can_read(x) for x in introductions)
        agreed = all(_tell(int(everybody), group))
        _processes[group] = tuple(int(x[1]) for x in introductions) if agreed else ()
    return _processes[group]


def _tell(number: int, group: dist.ProcessGroup) -> list[int]:
    """Those of all ranks. Not by torch's all_gather_into_tensor, which megatron's context for many would put off."""
    numbers = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(numbers, torch.tensor([number]), group=group)
    return [int(x) for x in numbers]


def _others(group: dist.ProcessGroup) -> list[int]:
    """From the next on: no rank is read by all at once."""
    rank, size = group.rank(), group.size()
    return [(rank + k) % size for k in range(1, size)]
