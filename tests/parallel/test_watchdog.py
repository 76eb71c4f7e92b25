"""The watchdog's clocks and judgements, without ranks; what befalls ranks is in test_faults."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hybridflow.errors import ConfigError, RewardError
from hybridflow.parallel import watchdog as watchdogs
from hybridflow.parallel.diagnosis import lost_peer, python_stacks
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.watchdog import Watchdog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(watchdogs.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def watchdog(clock: SimpleNamespace) -> Watchdog:
    watchdog = Watchdog({"rollout": 10.0, "update": 50.0}, StopRequest(1.0, signals=()))
    watchdog._interval, watchdog._looked, watchdog._heard = 1.0, clock.now, clock.now
    return watchdog


def test_a_deadline_begins_anew_with_each_phase(watchdog: Watchdog, clock: SimpleNamespace) -> None:
    assert not watchdog._overdue()
    watchdog.enter("rollout")
    clock.now += 9.9
    assert not watchdog._overdue()
    watchdog.enter("rollout")
    clock.now += 9.9
    assert not watchdog._overdue() and watchdog._phase() == ("rollout", pytest.approx(9.9))
    clock.now += 0.2
    assert watchdog._overdue()
    watchdog.enter("update")
    clock.now += 40
    assert not watchdog._overdue()
    watchdog.rest()
    clock.now += 1e6
    assert not watchdog._overdue()


def test_a_phase_within_another_gives_it_back_anew(watchdog: Watchdog, clock: SimpleNamespace) -> None:
    watchdog.enter("update")
    clock.now += 45
    with watchdog.phase("rollout"):
        clock.now += 8
        assert watchdog._phase() == ("rollout", 8)
    assert watchdog._phase() == ("update", 0)
    watchdog.rest()
    with pytest.raises(ConfigError), watchdog.phase("rollout"):
        raise ConfigError("")
    assert watchdog._phase() == ("none", 0.0)


def test_an_unknown_phase_is_refused(watchdog: Watchdog) -> None:
    with pytest.raises(AssertionError, match="'save' is no phase: rollout, update"):
        watchdog.enter("save")


def test_time_in_which_the_process_was_stopped_does_not_count(watchdog: Watchdog, clock: SimpleNamespace) -> None:
    watchdog.enter("rollout")
    clock.now += 1
    watchdog._count_pause()
    clock.now += 3600  # of which a round may have taken 21
    watchdog._count_pause()
    assert watchdog._phase() == ("rollout", pytest.approx(22))
    assert clock.now - watchdog._heard == pytest.approx(22)
    watchdog.enter("rollout")
    clock.now += 5
    assert watchdog._phase() == ("rollout", 5)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(GLOO), True),
        (RuntimeError("Connection reset by peer"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("whatever"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError(GLOO), False),
        (ConfigError("NCCL"), False),
    ],
)
def test_errors_of_a_lost_peer_are_told_apart(error: Exception, lost: bool) -> None:
    assert lost_peer(error) is lost


def test_an_error_out_of_a_lost_peers_is_one_too_but_not_a_users() -> None:
    for kind, lost in ((ValueError, True), (RewardError, False)):
        try:
            try:
                raise RuntimeError(GLOO)
            except RuntimeError as error:
                raise kind("so it failed") from error
        except (ValueError, RewardError) as error:
            assert lost_peer(error) is lost


def test_the_main_thread_is_told_first() -> None:
    lines = python_stacks().splitlines()
    assert lines[0] == "  MainThread:"
    assert any("test_the_main_thread_is_told_first" in line for line in lines)
