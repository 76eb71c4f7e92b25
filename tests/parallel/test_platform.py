"""Which rank reports an error: the first one, and every one where nobody can say which was first."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from hybridflow.parallel import platform as platforms


class Store:
    def __init__(self, answer: Callable[[], int]) -> None:
        self._answer, self.timeouts = answer, []

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)

    def add(self, key: str, amount: int) -> int:
        assert (key, amount) == ("hybridflow/errors", 1)
        return self._answer()


def gone() -> int:
    raise dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed.")


def silent() -> int:
    raise dist.DistStoreError("wait timeout after 30000ms")


@pytest.mark.parametrize(("answer", "first"), [(lambda: 1, True), (lambda: 2, False), (gone, True), (silent, True)])
def test_the_first_to_fail_reports_and_everybody_where_the_store_is_gone(
    answer: Callable[[], int], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(answer)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert platforms.first_to_fail() is first
    assert store.timeouts == [timedelta(seconds=30)]


def test_a_store_that_cannot_be_met_is_no_error_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert platforms.first_to_fail() is True


@pytest.mark.parametrize(("rank", "first"), [("0", True), ("1", False)])
def test_without_a_store_rank_0_reports(rank: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", rank)
    assert platforms.first_to_fail() is first
