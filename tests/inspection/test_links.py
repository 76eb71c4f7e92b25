"""A link measured between two threads of this process, by gloo: whole, slow, with another clock, and dead."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from hybridflow.inspection import links
from hybridflow.inspection.links import FIRST_BYTES, follow_link, lead_link, measure_all_reduce
from hybridflow.parallel.standalone_groups import StandaloneGroup

pytestmark = pytest.mark.slow  # waits for processes

SECONDS = timedelta(seconds=20)


def both(count: int, act: Callable[[int, HashStore], Any]) -> list[Any]:
    """What `act` gives in `count` threads, or the error that it raises there."""
    store, found = HashStore(), [None] * count

    def run(rank: int) -> None:
        try:
            found[rank] = act(rank, store)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


def group(rank: int, store: HashStore, size: int = 2, timeout: timedelta = SECONDS) -> StandaloneGroup:
    return StandaloneGroup(store, "test", rank=rank, size=size, timeout=timeout)


def test_a_link_with_a_clock_that_is_ahead() -> None:
    def act(rank: int, store: HashStore) -> Any:
        own = group(rank, store)
        return follow_link(own, lambda: time.time() + 2.5) if rank else lead_link(own)

    found, _ = both(2, act)
    assert found.offset == pytest.approx(2.5, abs=0.05)
    assert 1e-6 < found.latency < 0.1
    assert found.num_bytes == links.MOST_BYTES["cpu"] and found.rate == min(found.out_rate, found.back_rate) > 20e6


class Slowed(StandaloneGroup):
    """The sender of a link of so many bytes a second."""

    bytes_per_second = 125_000.0  # 1 Mbit/s

    def send(self, tensor: Tensor, to: int) -> None:
        time.sleep(tensor.nbytes / self.bytes_per_second)
        super().send(tensor, to)


def test_a_link_of_1_megabit_back_is_measured_within_seconds() -> None:
    def act(rank: int, store: HashStore) -> Any:
        if rank:
            return follow_link(Slowed(store, "test", rank=1, size=2, timeout=SECONDS))
        start = time.monotonic()
        return lead_link(group(0, store)), time.monotonic() - start

    (found, seconds), _ = both(2, act)
    assert 60_000 < found.back_rate < 127_000
    assert found.out_rate > 100 * found.back_rate and found.rate == found.back_rate
    assert seconds < 10


def test_who_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    def act(rank: int, store: HashStore) -> Any:
        return None if rank else group(0, store, timeout=timedelta(seconds=1))

    start = time.monotonic()
    error, _ = both(2, act)
    assert isinstance(error, RuntimeError) and "ait timeout" in str(error)
    assert 0.9 < time.monotonic() - start < 10


def test_who_falls_silent_is_waited_for_so_long_and_no_longer() -> None:
    def act(rank: int, store: HashStore) -> Any:
        own = group(rank, store, timeout=timedelta(seconds=1))
        if rank:
            time.sleep(3)
            return own
        return lead_link(own)

    error, _ = both(2, act)
    assert isinstance(error, RuntimeError) and "Timed out waiting 1000ms" in str(error)


def test_all_reduce_of_three_counts_what_each_moves() -> None:
    found = both(3, lambda rank, store: measure_all_reduce(group(rank, store, size=3)))
    assert found[1:] == [(0.0, 0.0)] * 2  # rank 0 tells
    assert found[0][0] > 1e6 and 0 < found[0][1] < 1


@pytest.mark.parametrize(
    ("bytes_per_second", "largest", "num_messages", "seconds"),
    [
        (1e3, FIRST_BYTES, 1, 4.096),  # a slow first message is the last one
        (125e3, 64 << 10, 3, 0.688),
        (1.25e6, 256 << 10, 4, 0.279),
        (1e9, 16 << 20, 9, 0.056),  # the largest three times
    ],
)
def test_messages_grow_while_there_is_time(
    bytes_per_second: float, largest: int, num_messages: int, seconds: float
) -> None:
    spent: list[float] = []

    def seconds_of(size: int) -> float:
        spent.append(size / bytes_per_second)
        return spent[-1]

    assert links._grow(seconds_of, 16 << 20) == (pytest.approx(bytes_per_second), largest)
    assert (len(spent), sum(spent)) == (num_messages, pytest.approx(seconds, abs=1e-3))


def test_what_a_limiter_lets_through_at_once_is_not_the_rate() -> None:
    """A token bucket of 16 KiB at 1 Mbit/s: the first messages are free."""
    rate, _ = links._grow(lambda size: 1e-4 + max(0, size - (16 << 10)) / 125e3, 16 << 20)
    assert 125e3 < rate < 180e3
