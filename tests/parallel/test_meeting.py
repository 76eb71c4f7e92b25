"""Orders and answers through a store: who is silent is known, and ends all the same."""

import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import rank0_commands as meeting
from hybridflow.parallel.rank0_commands import CommandLeader, doing, follow


def act(rank: int, store: HashStore):
    def perform(order: dict) -> dict:
        doing(store, rank, f"in {order['act']}")
        time.sleep(order.get("sleeps", {}).get(str(rank), 0))
        return {"rank": rank, "act": order["act"]}

    return perform


def test_who_is_silent_is_named_and_left_out_and_ends_late() -> None:
    store, last = HashStore(), {}
    followers = [
        threading.Thread(target=lambda rank=rank: last.update({rank: follow(store, rank, act(rank, store))}))
        for rank in (1, 2)
    ]
    for follower in followers:
        follower.start()
    leader = CommandLeader(store, 4, act(0, store))  # rank 3 never comes
    order = {"act": "look", "sleeps": {"2": 1.0}}
    assert leader.ask(dict.fromkeys(range(4), order), 0.5) == {rank: {"rank": rank, "act": "look"} for rank in (0, 1)}
    assert leader.missing == {2: "in look", 3: "has not started"}
    start = time.monotonic()
    order = {"act": "link"}
    assert leader.ask(dict.fromkeys(range(1, 4), order), 5) == {1: {"rank": 1, "act": "link"}}
    assert time.monotonic() - start < 4.5  # nobody waits for who was silent before
    leader.end({"came": "of it"}, 5)
    for follower in followers:
        follower.join(10)
    assert last == {1: {"came": "of it"}, 2: {"came": "of it"}}


def test_a_leader_alone() -> None:
    store = HashStore()
    leader = CommandLeader(store, 1, act(0, store))
    assert leader.ask({0: {"act": "greet"}}, 1) == {0: {"rank": 0, "act": "greet"}}
    leader.end({}, 1)
    assert leader.missing == {}


def test_a_leader_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENCE_SECONDS", 0.2)
    with pytest.raises(EnvironmentProblem, match=r"rank 3: rank 0 has said nothing for 0\.2 s"):
        follow(HashStore(), 3, lambda order: {})


class Stuck:
    """A store whose host is cut off: it answers nothing, and raises in the end, or not."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def check(self, keys: list[str]) -> bool:
        time.sleep(self.seconds)
        raise RuntimeError("Connection was likely closed")


def test_a_store_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "STORE_SECONDS", 0.2)
    start = time.monotonic()
    assert meeting.wait_for(Stuck(5.0), ["key"], 0.1) is False
    assert time.monotonic() - start < 4.5
    with pytest.raises(RuntimeError, match="likely closed"):
        meeting.wait_for(Stuck(0.0), ["key"], 0.1)
