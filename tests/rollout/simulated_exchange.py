"""Ranks as threads of one process: `Exchange.swap` of all of them, and how many bytes go from whom to whom."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")
SECONDS = 30.0  # that a rank waits for the others


class SimulatedGroup:
    """Of these ranks. bytes: by (source, target) in the world, of ranks that differ."""

    def __init__(self, ranks: Sequence[int], sent: dict[tuple[int, int], int]) -> None:
        self.ranks, self.sent, self._barrier = tuple(ranks), sent, threading.Barrier(len(ranks))
        self._boxes: list[Sequence[Tensor]] = [()] * len(ranks)

    def size(self) -> int:
        return len(self.ranks)

    def swap(self, rank: int, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        own = self.ranks.index(rank)
        self._boxes[own] = outgoing
        for target, told in zip(self.ranks, outgoing, strict=True):
            if target != rank and len(told):
                self.sent[rank, target] = self.sent.get((rank, target), 0) + len(told)
        self._barrier.wait(SECONDS)
        found = [box[own].clone() for box in self._boxes]
        self._barrier.wait(SECONDS)
        assert [len(told) for told in found] == list(sizes), "a rank sends what another one expects"
        return found


class SimulatedExchange:
    """As one rank has it."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.group, self._rank = group, rank

    def swap(self, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return self.group.swap(self._rank, outgoing, sizes)


def on_ranks(count: int, act: Callable[[int], Result]) -> list[Result]:
    """What each rank's call returns."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result(2 * SECONDS) for future in [pool.submit(act, rank) for rank in range(count)]]
