"""Schedules by hand: on devices of one's own, and where ranks share a host."""

import pytest

from hybridflow.automap.cost import Cost, Part
from hybridflow.automap.timeline import TimedOperation, busy_seconds, schedule


def work(name: str, ranks: tuple[int, ...], seconds: float, load: float = 0.0) -> TimedOperation:
    return TimedOperation(name, name, ranks, Cost((Part("products", seconds, load),)))


def times(operations: list[TimedOperation], *, shared: bool, ranks_per_host: int = 8) -> dict[str, tuple[float, float]]:
    spans = schedule(operations, ranks_per_host=ranks_per_host, shared=shared)
    return {span.phase: (pytest.approx(span.begin), pytest.approx(span.begin + span.seconds)) for span in spans}


@pytest.mark.parametrize("shared", [False, True])
def test_an_operation_waits_for_all_of_its_ranks(shared: bool) -> None:
    operations = [work("a", (0,), 1.0), work("b", (1,), 3.0), work("c", (0, 1), 2.0), work("d", (2,), 4.0)]
    found = times(operations, shared=shared)
    assert found == {"a": (0.0, 1.0), "b": (0.0, 3.0), "c": (3.0, 5.0), "d": (0.0, 4.0)}


def test_two_that_fill_a_host_take_twice_as_long() -> None:
    found = times([work("a", (0,), 1.0, 1.0), work("b", (1,), 3.0, 1.0)], shared=True)
    # to 2.0 each has half; then b, of which 2 s are left, has all
    assert found == {"a": (0.0, 2.0), "b": (0.0, 4.0)}


def test_who_asks_for_less_than_there_is_gets_it() -> None:
    assert times([work("a", (0,), 1.0, 0.5), work("b", (1,), 3.0, 0.5)], shared=True) == {
        "a": (0.0, 1.0),
        "b": (0.0, 3.0),
    }
    # three that ask for half: each has a third, 1.5 times as long
    three = [work(name, (i,), 1.0, 0.5) for i, name in enumerate("abc")]
    assert times(three, shared=True) == dict.fromkeys("abc", (0.0, 1.5))


def test_many_busy_ranks_lose_to_each_other() -> None:
    operations = [work("a", (0, 1), 1.0, 0.5), work("b", (2,), 2.0, 0.25)]
    crowded = {3: 2.0, 1: 1.0}
    spans = schedule(operations, ranks_per_host=8, shared=True, crowded=lambda busy, role: crowded[int(busy)])
    ends = {span.phase: span.begin + span.seconds for span in spans}
    # three ranks: both take twice as long; after 2 s one second of b is left, which is then alone
    assert ends == {"a": pytest.approx(2.0), "b": pytest.approx(3.0)}


def test_other_hosts_share_nothing() -> None:
    found = times([work("a", (0,), 1.0, 1.0), work("b", (1,), 3.0, 1.0)], shared=True, ranks_per_host=1)
    assert found == {"a": (0.0, 1.0), "b": (0.0, 3.0)}
    # an operation on both hosts asks for half of its load on either
    both = times([work("a", (0, 1), 1.0, 2.0)], shared=True, ranks_per_host=1)
    assert both == {"a": (0.0, 1.0)}
    assert times([work("a", (0, 1), 1.0, 2.0)], shared=True) == {"a": (0.0, 2.0)}


def test_the_seconds_of_ranks_are_those_of_their_operations() -> None:
    spans = schedule([work("a", (0, 1), 1.0), work("b", (1,), 2.0)], ranks_per_host=8, shared=False)
    assert busy_seconds(spans) == {0: 1.0, 1: 3.0}
