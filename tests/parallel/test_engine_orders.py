"""Orders that come, and a store that is gone."""

from typing import Any

import pytest

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import engine_orders
from hybridflow.parallel.engine_orders import EngineOrders


class Store:
    """Of a run whose torchrun is killed after `answers` looks. has: None where nobody answers, as `StoreClient`."""

    def __init__(self, answers: int, order: str | None) -> None:
        self._answers, self._order = answers, order

    def read(self, key: str) -> str | None:
        self._answers -= 1
        return self._order if self._answers <= 0 else None

    def has(self, key: str) -> bool | None:
        return False if self._answers > 0 else None


def orders(store: Any) -> EngineOrders:
    return EngineOrders(store, gives=False)


def test_an_order_is_waited_for_as_long_as_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_orders, "STORE_SILENCE", 0.0)
    assert orders(Store(9, '{"act": "generate", "iteration": 3}')).next() == {"act": "generate", "iteration": 3}


def test_a_store_that_is_gone_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_orders, "STORE_SILENCE", 0.2)
    with pytest.raises(EnvironmentProblem, match=r"has not answered for 0.2 s: torchrun"):
        orders(Store(3, None)).next()
