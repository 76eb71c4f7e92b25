"""Waiting for messages in a device's memory is counted by events of the stream, which is simulated here."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.parallel import collectives
from hybridflow.parallel.collectives import Collectives, WaitingTime


class Stream:
    """A stream that runs when `run_until` says so. An event passes when the stream comes to it."""

    def __init__(self) -> None:
        self.now, self.passed, self.made, self.capturing = 0.0, 0.0, 0, False

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, -1.0

    def record(self) -> None:
        self.at = self.stream.now

    def query(self) -> bool:
        return self.at <= self.stream.passed

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "CUDA raises an error for an event that has not passed"
        return 1e3 * (end.at - self.at)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.capturing)
    return stream


def hold_up(time: WaitingTime, stream: Stream, seconds: float) -> None:
    began = time.mark()
    stream.now += seconds
    time.add_since(began)


def test_seconds_between_events_add_up_and_events_are_used_again(stream: Stream) -> None:
    time = WaitingTime()
    for seconds in (0.5, 0.25):
        hold_up(time, stream, seconds)
        stream.now += 7.0  # the rank computes
        stream.passed = stream.now
        time.seconds()
    time.add(2.0)  # the host
    assert time.seconds() == pytest.approx(2.75) and stream.made == 2


def test_nobody_waits_for_the_stream_while_events_pile_up(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MOST_PENDING", 2)
    time = WaitingTime()
    for _ in range(5):
        hold_up(time, stream, 1.0)  # none has passed, and none is read
    assert stream.made == 10
    stream.passed = 4.0
    hold_up(time, stream, 1.0)  # reads the four that have passed
    assert stream.made == 12
    hold_up(time, stream, 1.0)
    assert stream.made == 12
    stream.passed = stream.now
    assert time.seconds() == pytest.approx(7.0)


def test_a_captured_graph_and_another_thread_are_left_out(stream: Stream) -> None:
    time = WaitingTime()
    stream.capturing = True
    hold_up(time, stream, 1.0)
    stream.capturing = False
    thread = threading.Thread(target=lambda: (hold_up(time, stream, 1.0), time.add(1.0)))
    thread.start()
    thread.join()
    assert time.seconds() == 0.0 and stream.made == 0


# ------------------------------------------------------------------------------------------------ in collectives


@pytest.fixture
def record() -> Iterator[Collectives]:
    record = Collectives.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield record
    dist.destroy_process_group()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_is_held_up_from_the_call_or_from_the_wait(
    asynchronous: bool, record: Collectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed between a call that returns at once and the wait is no waiting."""
    marks: list[str] = []
    device = SimpleNamespace(mark=lambda: marks.append("mark") or len(marks), add_since=lambda at: marks.append(at))
    monkeypatch.setattr(record, "waiting", device)
    monkeypatch.setattr(torch.Tensor, "device", SimpleNamespace(type="cuda"))
    work: Any = record._noted(lambda group, *args: Work(), "allreduce", 1)
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    found = work(dist.group.WORLD, [torch.ones(1)], options)
    marks.append("compute")
    record._noted_wait(Work.wait)(found)
    expected = ["compute", "mark", 2] if asynchronous else ["mark", "compute", 1]
    assert marks == expected


class Work:
    def wait(self) -> None:
        pass
