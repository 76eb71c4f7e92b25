"""Bandwidth, latency and clock offset of one link, and the bandwidth of all-reduce in a group; all bounded in time.

Each link is measured in a small group of the ranks that take part. Where a link is dead, only this group fails, after
`LINK_SECONDS`, and the failure names the two ends. Messages grow while they stay fast, so that a link of
1 Mbit/s takes no longer than one of 100 Gbit/s.
"""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
from torch import Tensor

from hybridflow.inspection.verdicts import LinkFigures, clock_offset
from hybridflow.parallel.standalone_groups import StandaloneGroup

LINK_SECONDS = timedelta(seconds=10)  # that anything may take before a link counts as dead
DIRECTION_SECONDS = 0.8  # for the messages of one direction; the first and the last one may go beyond
PING_SECONDS = 0.4
NUM_PINGS = 20
FIRST_BYTES = 4 << 10
MOST_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
GROWTH = 4
REPEATS = 3  # of the largest message, where there is time
PING, OUT, BACK, END = range(4)


def lead_link(group: StandaloneGroup, clock: Callable[[], float] = time.time) -> LinkFigures:
    """Measure the link to rank 1 of a group of two, which calls `follow_link`. Errors: RuntimeError if it is dead."""
    latency, offset = _ping(group, clock)
    out_rate, out_bytes = _grow(lambda size: _timed(group, OUT, size), MOST_BYTES[group.device.type])
    back_rate, back_bytes = _grow(lambda size: _timed(group, BACK, size), MOST_BYTES[group.device.type])
    _order(group, END, 0)
    return LinkFigures(out_rate, back_rate, latency, offset, max(out_bytes, back_bytes))


def follow_link(group: StandaloneGroup, clock: Callable[[], float] = time.time) -> None:
    """The other end of `lead_link`: does what that says until it says the end."""
    order, answer = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.float64)
    while True:
        group.receive(order, 0)
        received = clock()
        act, size = order.tolist()
        if act == END:
            return
        if act == PING:
            answer[0], answer[1] = received, clock()
        elif act == OUT:
            group.receive(_payload(group, size), 0)
        else:
            group.send(_payload(group, size), 0)
        if act != BACK:
            group.send(answer, 0)


def _ping(group: StandaloneGroup, clock: Callable[[], float]) -> tuple[float, float]:
    """(latency, offset of the other clock) in seconds: of the shortest round trip, which can be off the least."""
    answer = torch.zeros(2, dtype=torch.float64)
    best = (float("inf"), 0.0)
    start = time.perf_counter()
    for _ in range(NUM_PINGS):
        sent, before = clock(), time.perf_counter()
        _order(group, PING, 0)
        group.receive(answer, 1)
        trip = time.perf_counter() - before
        received, answered = answer.tolist()
        ahead, _ = clock_offset(sent, received, answered, sent + trip)
        best = min(best, (trip, ahead))
        if time.perf_counter() - start > PING_SECONDS:
            break
    return best[0] / 2, best[1]


def _timed(group: StandaloneGroup, act: int, size: int) -> float:
    """Seconds of a message of so many bytes, from the order until it is there."""
    payload = _payload(group, size)
    start = time.perf_counter()
    _order(group, act, size)
    if act == OUT:
        group.send(payload, 1)
        group.receive(torch.zeros(2, dtype=torch.float64), 1)  # it has arrived
    else:
        group.receive(payload, 1)
    return time.perf_counter() - start


def _order(group: StandaloneGroup, act: int, size: int) -> None:
    group.send(torch.tensor([act, size], dtype=torch.int64), 1)


def _payload(group: StandaloneGroup, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=group.device)


def _grow(seconds_of: Callable[[int], float], most_bytes: int) -> tuple[float, int]:
    """(best bytes a second, bytes) of the largest message: messages grow while the next can be in time.

    Smaller ones tell nothing: buffers and a limiter's allowance for bursts swallow them at once.
    """
    best: dict[int, float] = {}
    size, spent = 0, 0.0
    for size in _sizes(most_bytes):
        took = seconds_of(size)
        best[size], spent = max(best.get(size, 0.0), size / took), spent + took
        if spent + GROWTH * took > DIRECTION_SECONDS:
            break
    return best[size], size


def _sizes(most_bytes: int) -> Iterator[int]:
    size = FIRST_BYTES
    while size < most_bytes:
        yield size
        size *= GROWTH
    yield from [most_bytes] * REPEATS


# ------------------------------------------------------------------------------------------------ all-reduce


def measure_all_reduce(group: StandaloneGroup) -> tuple[float, float]:
    """(bus bytes a second, seconds of the smallest one). Collective over the group, whose rank 0 sets the sizes.

    The bus rate is 2 (n - 1) / n x bytes / seconds, what each of n ranks sends and receives in the best algorithm: it
    is comparable to the rate of a link. Errors: RuntimeError where a rank of the group does not answer.
    """
    seconds: dict[int, float] = {}
    size = torch.zeros(1, dtype=torch.int64)

    def one(num_bytes: int) -> float:
        size[0] = num_bytes
        group.broadcast(size)
        taken = _all_reduce(group, num_bytes)
        seconds[num_bytes] = min(taken, seconds.get(num_bytes, taken))
        return taken

    share = 2 * (group.size - 1) / group.size
    if group.rank == 0:
        best, _ = _grow(one, MOST_BYTES[group.device.type])
        size[0] = 0
        group.broadcast(size)
        return best * share, seconds[FIRST_BYTES]
    while True:
        group.broadcast(size)
        if not size.item():
            return 0.0, 0.0  # rank 0 tells
        _all_reduce(group, int(size))


def _all_reduce(group: StandaloneGroup, num_bytes: int) -> float:
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=group.device)
    start = time.perf_counter()
    group.all_reduce(tensor)
    return time.perf_counter() - start
