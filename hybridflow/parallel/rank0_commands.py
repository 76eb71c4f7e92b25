"""Rank 0 gives orders and has answers, through the store alone: whoever does not answer is known by name.

A collective in which one rank is missing fails on all of them, and none can say who was missing. Here rank 0 waits for
each answer so long and no longer, and goes on without the ranks that gave none. The others do what rank 0 orders.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch._C._distributed_c10d import Store

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.process_exit import in_time

Order = dict[str, Any]  # JSON; "act" says what is to be done
Answer = dict[str, Any]
Perform = Callable[[Order], Answer]

END = "end"
SILENCE_SECONDS = 300.0  # without an order, after which rank 0 counts as lost
STORE_SECONDS = 5.0  # that the store may take for an answer
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks into the store


class CommandLeader:
    """Rank 0's side, which does rank 0's part of every order by itself."""

    def __init__(self, store: Store, world_size: int, perform: Perform) -> None:
        self._store, self._perform = store, perform
        self._given = dict.fromkeys(range(world_size), 0)  # orders by rank
        self.missing: dict[int, str] = {}  # ranks that have not answered -> what they were doing

    def ask(self, orders: Mapping[int, Order], seconds: float) -> dict[int, Answer]:
        """The answers of those that answer within so long. Who has once not answered is not asked again."""
        orders = {rank: order for rank, order in orders.items() if rank not in self.missing}
        until = time.monotonic() + seconds
        for rank, order in orders.items():
            if rank:
                self._store.set(f"order/{rank}/{self._given[rank]}", json.dumps(order))
        answers = {0: self._perform(orders[0])} if 0 in orders else {}
        for rank in orders:
            if rank:
                key = f"answer/{rank}/{self._given[rank]}"
                self._given[rank] += 1
                if wait_for(self._store, [key], until - time.monotonic()):
                    answers[rank] = json.loads(self._store.get(key))
                else:
                    self.missing[rank] = self._doing(rank)
        return answers

    def end(self, last: Answer, seconds: float) -> None:
        """Tell the others that this was all, and what came of it; wait until they know, so long."""
        order = {"act": END, "last": last}
        for rank in self.missing:  # one that is only late ends as well
            if rank:
                self._store.set(f"order/{rank}/{self._given[rank]}", json.dumps(order))
        self.ask({rank: order for rank in self._given if rank}, seconds)

    def _doing(self, rank: int) -> str:
        key = f"doing/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "has not started"


def follow(store: Store, rank: int, perform: Perform) -> Answer:
    """Do what rank 0 orders until it says the end; what came of it. Errors: EnvironmentProblem if rank 0 is silent."""
    number = 0
    while True:
        key = f"order/{rank}/{number}"
        if not wait_for(store, [key], SILENCE_SECONDS):
            raise EnvironmentProblem(f"rank {rank}: rank 0 has said nothing for {SILENCE_SECONDS:g} s")
        order: Order = json.loads(store.get(key))
        ended = order["act"] == END
        answer = {} if ended else perform(order)
        store.set(f"answer/{rank}/{number}", json.dumps(answer))
        if ended:
            last: Answer = order["last"]
            return last
        number += 1


def doing(store: Store, rank: int, what: str) -> None:
    """What rank 0 will say that this rank was doing, if it never answers."""
    store.set(f"doing/{rank}", what)


def wait_for(store: Store, keys: Iterable[str], seconds: float) -> bool:
    """Whether all keys are there within so long; looks once at least. The store's own wait warns when it is over.

    A store whose host is cut off answers nothing for minutes, whatever the time-out: the look is given up.
    """
    wanted, until = list(keys), time.monotonic() + seconds
    found: list[bool | RuntimeError] = []

    def look() -> None:
        pause = SHORTEST_PAUSE
        try:
            while not store.check(wanted) and time.monotonic() < until:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            found.append(store.check(wanted))
        except RuntimeError as error:  # raised again where somebody waits for it
            found.append(error)

    if not in_time(look, max(0.0, seconds) + STORE_SECONDS):
        return False
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]
