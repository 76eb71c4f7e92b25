"""The ranks that train tell the engines on other ranks what to do next, through the store: nobody waits to be heard.

    orders.give("generate", iteration=3)        # on every rank that trains; the first of them writes
    order = orders.next()                       # on the engines' ranks, which wait for it

An engine takes one order after the other. No collective has to wait while an engine waits for the next order, so that
a long update meets no time-out.
"""

import json
import time
from typing import Any

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.store_client import StoreClient

Order = dict[str, Any]  # JSON; "act" says what is to be done
END = "end"
STORE_SILENCE = 30.0  # seconds
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks into the store


class EngineOrders:
    """Of this rank. gives: it is the one that writes orders down."""

    def __init__(self, store: StoreClient, *, gives: bool) -> None:
        self._store, self._gives, self._number = store, gives, 0

    def give(self, act: str, **values: Any) -> None:
        """The next order. Returns at once."""
        if self._gives:
            self._store.deliver(str(self._number), json.dumps({"act": act, **values}))
        self._number += 1

    def next(self) -> Order:
        """Wait for the next order. Errors: EnvironmentProblem where the store has not answered for STORE_SILENCE."""
        key, pause, heard = str(self._number), SHORTEST_PAUSE, time.monotonic()
        while (text := self._store.read(key)) is None:
            if self._store.has(key) is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard > STORE_SILENCE:
                raise EnvironmentProblem(
                    f"the store of the ranks has not answered for {STORE_SILENCE:g} s: torchrun, which keeps the "
                    "store, has probably been killed. Start the run again"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._number += 1
        order: Order = json.loads(text)
        return order

    def ends(self) -> bool:
        """Whether the next order is there, and says that the run ends."""
        text = self._store.read(str(self._number))
        return text is not None and json.loads(text)["act"] == END
