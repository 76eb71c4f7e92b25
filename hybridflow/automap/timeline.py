"""Who works when: operations in program order, each on several ranks at once, which may share a host. Pure.

An operation begins when each of the ranks has it next. On devices of one's own the operation takes `Cost.seconds`. On a
host whose processors are shared, and asked for more than they have, each operation has a part of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridflow.automap.cost import Bound, Cost


@dataclass(frozen=True)
class TimedOperation:
    phase: str
    role: str
    ranks: tuple[int, ...]
    cost: Cost
    stages: tuple[int, ...] = ()  # of the ranks, where these are a pipeline


@dataclass(frozen=True)
class Span:
    """What ranks do from `begin` on, in seconds since the iteration's begin.

    waits: of the ranks, the share of the seconds in which each waits for the other stages of the pipeline; () for none.
    """

    phase: str
    role: str
    ranks: tuple[int, ...]
    begin: float
    seconds: float
    bound: Bound
    waits: tuple[float, ...] = ()


Crowded = Callable[[float, str], float]  # how many times longer with so many busy ranks on a host, by role


def schedule(
    operations: Sequence[TimedOperation],
    *,
    ranks_per_host: int,
    shared: bool,
    crowded: Crowded = lambda busy, role: 1.0,
) -> tuple[Span, ...]:
    """In the order in which they were given. shared: whether ranks of a host share processors."""
    times = _sharing(operations, ranks_per_host, crowded) if shared else _alone(operations)
    return tuple(
        Span(each.phase, each.role, each.ranks, begin, end - begin, bound=each.cost.bound, waits=_waits(each))
        for each, (begin, end) in zip(operations, times, strict=True)
    )


def _waits(operation: TimedOperation) -> tuple[float, ...]:
    of_stage = [operation.cost.wait_of(stage) for stage in range(len(operation.cost.waits))]
    return tuple(of_stage[stage] for stage in operation.stages) if of_stage else ()


def _alone(operations: Sequence[TimedOperation]) -> list[tuple[float, float]]:
    free: dict[int, float] = {}
    found = []
    for each in operations:
        begin = max((free.get(rank, 0.0) for rank in each.ranks), default=0.0)
        end = begin + each.cost.seconds
        free.update(dict.fromkeys(each.ranks, end))
        found.append((begin, end))
    return found


@dataclass
class _Active:
    """An operation under way: what is left of it, from 1 to 0."""

    number: int
    operation: TimedOperation
    hosts: tuple[int, ...]
    begin: float
    left: float = 1.0
    seconds: float = field(default=0.0)  # of the whole of it, at the share that it has now


def _sharing(operations: Sequence[TimedOperation], ranks_per_host: int, crowded: Crowded) -> list[tuple[float, float]]:
    """From one begin or end to the next."""
    queues: dict[int, list[int]] = {}
    for number, each in enumerate(operations):
        for rank in each.ranks:
            queues.setdefault(rank, []).append(number)
    for queue in queues.values():
        queue.reverse()
    waiting = {number: len(each.ranks) for number, each in enumerate(operations)}  # ranks that are not there yet
    found: list[tuple[float, float]] = [(0.0, 0.0)] * len(operations)
    active: list[_Active] = []
    now, arrived = 0.0, list(queues)
    while arrived or active:
        for rank in arrived:
            if queues[rank]:
                number = queues[rank][-1]
                waiting[number] -= 1
                if not waiting[number]:
                    each = operations[number]
                    hosts = tuple(sorted({rank // ranks_per_host for rank in each.ranks}))
                    active.append(_Active(number, each, hosts, now))
        if not active:
            break
        _share_out(active, crowded)
        step = min(one.left * one.seconds for one in active)
        now += step
        done = [one for one in active if one.left * one.seconds <= step * (1 + 1e-12)]
        for one in active:
            one.left -= step / one.seconds if one.seconds else 1.0
        active = [one for one in active if one not in done]
        arrived = []
        for one in done:
            found[one.number] = (one.begin, now)
            for rank in operations[one.number].ranks:
                queues[rank].pop()
                arrived.append(rank)
    return found


def _share_out(active: Sequence[_Active], crowded: Crowded) -> None:
    """Seconds of each at a share of the hosts: what the others leave, or a part of what all ask for."""
    asked: dict[int, float] = {}
    busy: dict[int, float] = {}
    for one in active:
        for host in one.hosts:
            asked[host] = asked.get(host, 0.0) + one.operation.cost.load / len(one.hosts)
            busy[host] = busy.get(host, 0.0) + len(one.operation.ranks) / len(one.hosts)
    for one in active:
        cost = one.operation.cost
        own = cost.load / len(one.hosts)
        share = min((_share(own, asked[host]) for host in one.hosts), default=1.0)
        most = max((busy[host] for host in one.hosts), default=0.0)
        one.seconds = cost.on_share(share * len(one.hosts)) * crowded(most, one.operation.role)


def _share(own: float, asked: float) -> float:
    """Of one host."""
    if not own:
        return 1.0
    return min(1.0, max(own / asked, 1 - (asked - own)))


def busy_seconds(spans: Sequence[Span]) -> Mapping[int, float]:
    """By rank: the seconds in which it does something."""
    found: dict[int, float] = {}
    for span in spans:
        if span.bound == "waiting":
            continue
        waits = span.waits or (0.0,) * len(span.ranks)
        for rank, wait in zip(span.ranks, waits, strict=True):
            found[rank] = found.get(rank, 0.0) + (1 - wait) * span.seconds
    return found
