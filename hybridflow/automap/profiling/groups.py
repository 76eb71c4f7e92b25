"""Messages between ranks of a host: all-reduces in groups of each size, one group alone and all groups at once."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybridflow.automap.device import Collective, Link
from hybridflow.parallel.grid import ProcessGroups

SMALL, LARGE = 1 << 10, 1 << 22  # bytes
SECONDS = 0.15  # for one size of message, about


def sizes(world_size: int) -> list[int]:
    """Of groups: powers of two, and the world."""
    found = [2**i for i in range(1, 12) if 2**i <= world_size]
    return found if world_size in found or world_size == 1 else [*found, world_size]


def collectives(groups: ProcessGroups, rank: int, world_size: int, device: torch.device) -> list[Collective]:
    """Collective over the world: every rank gets the same."""
    return [_collective(groups, size, rank, world_size, device) for size in sizes(world_size)]


def _collective(groups: ProcessGroups, size: int, rank: int, world_size: int, device: torch.device) -> Collective:
    """Alone: seconds by bytes. At once: how much longer a small message takes, which is what the load is of."""
    count = world_size // size
    lists = [tuple(range(i * size, (i + 1) * size)) for i in range(count)]
    rest = tuple(range(count * size, world_size))
    group = groups.own([*lists, *((one,) for one in rest)])
    assert group is not None, "every rank is in a group"
    mine = rank in lists[0]
    small, large = (_timed(group, number, mine, device) for number in (SMALL, LARGE))
    together = _timed(group, LARGE, rank < count * size, device) if count > 1 else large
    small_together = _timed(group, SMALL, rank < count * size, device) if count > 1 else small
    moves, moves_together = (max(one - other, 1e-9) for one, other in ((large, small), (together, small_together)))
    return Collective(
        ranks=size,
        latency=small,
        bandwidth=(LARGE - SMALL) / moves,
        latency_load=max(small_together / small, 1.0) / count,
        bandwidth_load=max(moves_together / moves, 1.0) / count,
    )


def link(groups: ProcessGroups, rank: int, world_size: int, device: torch.device) -> Link:
    """Between the first two ranks: a message there and back."""
    if world_size == 1:
        return Link(bandwidth=1e9, latency=1e-4)
    group = groups.own([(0, 1), *((one,) for one in range(2, world_size))])
    assert group is not None, "every rank is in a group"

    def trip(number: int) -> Callable[[], None]:
        data = torch.zeros(number // 4, device=device)

        def run() -> None:
            for sender in (0, 1):
                if rank == sender:
                    dist.send(data, dst=1 - sender, group=group)
                else:
                    dist.recv(data, src=sender, group=group)

        return run

    small, large = (_seconds(trip(number), rank < 2, device) / 2 for number in (SMALL, LARGE))
    return Link(bandwidth=(LARGE - SMALL) / max(large - small, 1e-9), latency=small)


def _timed(group: dist.ProcessGroup, number: int, mine: bool, device: torch.device) -> float:
    data = torch.zeros(number // 4, device=device)
    return _seconds(lambda: dist.all_reduce(data, group=group), mine, device)


def _seconds(work: Callable[[], object], mine: bool, device: torch.device) -> float:
    """Of one call on the ranks that take part, the largest of them; others wait. As many calls on all."""
    dist.barrier(group=dist.group.WORLD)
    once = _run(work, 3, device) if mine else 0.0
    count = int(_largest(min(max(SECONDS / max(once, 1e-9), 5), 2000) if mine else 0.0, device))
    dist.barrier(group=dist.group.WORLD)
    return _largest(_run(work, count, device) if mine else 0.0, device)


def _run(work: Callable[[], object], count: int, device: torch.device) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / count


def _largest(value: float, device: torch.device) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
    return float(found)


def together(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """How many times what one rank does alone, all ranks do when they work at once; 1 at least."""
    dist.barrier(group=dist.group.WORLD)
    alone = _rate(work, seconds) if dist.get_rank() == 0 else 0.0
    dist.barrier(group=dist.group.WORLD)
    rates = torch.tensor([_rate(work, seconds), alone], dtype=torch.float64, device=device)
    dist.all_reduce(rates, group=dist.group.WORLD)
    return max(1.0, float(rates[0] / rates[1]))


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Calls a second."""
    work()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        work()
        count += 1
    return count / (time.perf_counter() - begin)


def hosts(names: Sequence[str]) -> int:
    """Ranks of the host of the first rank."""
    return names.count(names[0])
