"""Environments in real worker processes: a row stays with its own, and a lost process loses its rows only."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.environments.classes import described
from hybridflow.environments.instances import Instances
from hybridflow.environments.pool import EnvironmentPool
from hybridflow.parallel.child_processes import children
from hybridflow.rewards.pool import Answer, Pool

pytestmark = pytest.mark.slow  # waits for processes

USERS = "tests.environments.classes_of_users"
ROW = {"question": "1+1=", "answer": "2"}
Made = dict[str, Any]


def pool_of(name: str, **more: Any) -> EnvironmentPool:
    config = EnvironmentConfig(**{"class": f"{USERS}:{name}", "num_workers": 2, "call_seconds": 20.0, **more})
    return EnvironmentPool(config, described(config.path, config.arguments), ScoringConfig(), num_ranks=1)


@pytest.fixture()
def pool() -> Iterator[EnvironmentPool]:
    made = pool_of("Workers")
    yield made
    made.close()


def answers(pool: EnvironmentPool, tickets: list[int]) -> list[Answer]:
    found: dict[int, Answer] = {}
    while not all(ticket in found for ticket in tickets):
        found |= pool.answers(30.0)
    return [found[ticket] for ticket in tickets]


def started(pool: EnvironmentPool, count: int) -> list[int]:
    both = [pool.start(ROW, seed="1") for _ in range(count)]
    assert [answer.problem for answer in answers(pool, [ticket for _, ticket in both])] == [""] * count
    return [row for row, _ in both]


def turn(row: int, text: str = "", *calls: Made) -> Made:
    return {"kind": "turn", "row": row, "said": (text, False, 1, 10, False), "calls": list(calls)}


def said(pool: EnvironmentPool, rows: list[int], text: str = "") -> list[Answer]:
    return answers(pool, [pool.call(row, turn(row, text)) for row in rows])


def call(name: str, arguments: Any, problem: str = "") -> Made:
    return {"name": name, "arguments": arguments, "problem": problem}


def test_a_row_stays_with_its_process_and_rows_are_dealt_evenly(pool: EnvironmentPool) -> None:
    rows = started(pool, 6)
    first, again = ([answer.value["reward"][0] for answer in said(pool, rows, "pid")] for _ in range(2))
    assert first == again
    assert sorted(first.count(pid) for pid in set(first)) == [3, 3]


def test_a_row_that_has_ended_makes_room_at_once(pool: EnvironmentPool) -> None:
    """Nobody has to take the answer of its last call: new rows are dealt before that."""
    rows = started(pool, 6)
    pids = [answer.value["reward"][0] for answer in said(pool, rows, "pid")]
    ended = [row for row, pid in zip(rows, pids, strict=True) if pid == pids[0]]
    for row in ended:
        pool.finish(row)
    told: dict[int, Answer] = {}
    while len(told) < len(ended):
        told |= Pool.answers(pool, 30.0)
    assert {answer.value["reward"][0] for answer in said(pool, started(pool, 3), "pid")} == {pids[0]}


def test_a_killed_process_loses_its_rows_and_no_others(pool: EnvironmentPool) -> None:
    rows = started(pool, 6)
    pids = [int(answer.value["reward"][0]) for answer in said(pool, rows, "pid")]
    os.kill(pids[0], signal.SIGKILL)
    lost = [bool(answer.problem) for answer in said(pool, rows, "pid")]
    assert lost == [pid == pids[0] for pid in pids]
    assert [bool(answer.problem) for answer in said(pool, rows, "pid")] == lost
    assert "SIGKILL" in said(pool, rows[:1])[0].problem
    until = time.monotonic() + 30
    while len({answer.value["reward"][0] for answer in said(pool, started(pool, 4), "pid")}) < 2:
        assert time.monotonic() < until, "no other process has taken its place"
        time.sleep(0.1)


def test_a_call_that_is_late_costs_its_process() -> None:
    pool = pool_of("Workers", call_seconds=0.5)
    rows = started(pool, 4)
    pids = [answer.value["reward"][0] for answer in said(pool, rows, "pid")]
    assert said(pool, rows[:1], "sleep")[0].problem == "took longer than 0.5 s"
    assert [bool(answer.problem) for answer in said(pool, rows, "pid")] == [pid == pids[0] for pid in pids]
    pool.close()


def test_a_call_waits_for_no_time_that_others_take() -> None:
    """A deadline counts from when the call begins: ten calls of a process that each take half of it are not late."""
    pool = pool_of("Workers", call_seconds=1.0, num_workers=1)
    rows = started(pool, 5)
    assert [answer.problem for answer in said(pool, rows, "half")] == [""] * 5
    pool.close()


def test_nothing_is_left_when_the_pool_goes(pool: EnvironmentPool) -> None:
    pids = {int(answer.value["reward"][0]) for answer in said(pool, started(pool, 2), "pid")}
    assert pids <= set(children(pool.supervisor))
    os.kill(pool.supervisor, signal.SIGKILL)
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):  # it ends while it is read, or has ended
        return False


def test_the_models_mistakes_are_told_to_the_model() -> None:
    pool = pool_of("Talk")
    [row] = started(pool, 1)
    calls = [
        call("add", {"a": 1, "b": 2}),
        call("add", {"a": 1}),
        call("fails", {"n": 3}),
        call("nothing", {}),
        call("add", [1, 2]),
        call("", None, "no JSON"),
        call("step", {}),
    ]
    [found] = answers(pool, [pool.call(row, turn(row, "", *calls))])
    texts = [message["content"] for message in found.value["messages"]]
    assert {message["role"] for message in found.value["messages"]} == {"tool"}
    assert texts[0] == "3" and found.value["failed_calls"] == 6
    assert texts[1].startswith("error: TypeError: ") and "missing 1 required positional argument: 'b'" in texts[1]
    assert texts[2:] == [
        "error: ValueError: not 3",
        "error: there is no tool 'nothing'; the tools are add, fails",
        "error: the arguments of add are no JSON object",
        "error: no JSON",
        "error: there is no tool 'step'; the tools are add, fails",
    ]
    pool.close()


def test_what_a_decorated_method_lets_wait_for_is_awaited() -> None:
    instances = Instances("tests.environments.classes_of_users:Waits", {}, ())
    instances({"kind": "start", "row": 1, "seed": "1", "columns": {"question": "1+1"}})
    calls = [call("later", {"n": 1}), call("later", {"n": 2}), call("plainly", {"n": 1})]
    found = instances({"kind": "turn", "row": 1, "calls": calls})
    *texts, of_async = [message["content"] for message in found["messages"]]
    assert texts == ['{"n": 2}', "error: ValueError: not 2"] and found["failed_calls"] == 2
    assert of_async.startswith("error: TypeError: _doubled is an `async def` behind a decorator")


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("1+1", "step raised ValueError: on purpose"),
        ("4+1", "step returned nan; expected messages, or a finite number as the reward"),
        ("5+1", "step returned 'a text'; expected messages, or a finite number as the reward"),
    ],
)
def test_what_an_environment_does_wrong_is_told(question: str, problem: str) -> None:
    pool = pool_of("Fragile")
    row, ticket = pool.start({"question": question}, seed="1")
    assert answers(pool, [ticket, pool.call(row, turn(row))])[1].problem == problem
    pool.close()


def test_random_numbers_follow_from_the_seed_and_the_turn(pool: EnvironmentPool) -> None:
    """Whichever process has the row, and whatever else it did."""
    draws = []
    for seed in ("1", "1", "2"):
        row, ticket = pool.start(ROW, seed=seed)
        answers(pool, [ticket])
        draws.append([said(pool, [row], "random")[0].value["reward"][0] for _ in range(2)])
    assert draws[0] == draws[1] != draws[2] and draws[0][0] != draws[0][1]


def test_a_row_that_ends_is_closed(pool: EnvironmentPool, tmp_path: Any) -> None:
    [row] = started(pool, 1)
    said(pool, [row], f"close {tmp_path / 'closed'}")
    pool.finish(row)
    started(pool, 2)
    until = time.monotonic() + 10
    while not (tmp_path / "closed").exists() and time.monotonic() < until:
        pool.answers(0.1)
    assert (tmp_path / "closed").exists()


def test_rows_that_were_started_ahead_do_not_start_again() -> None:
    """The answers of other calls do not get lost meanwhile; what was started and is not asked for ends."""
    pool = pool_of("Talk")
    ahead = [{"question": question} for question in ("1+1=", "2+2=", "3+3=")]
    pool.start_ahead(ahead)
    row, ticket = pool.start({"question": "9+9="}, seed="1")
    found: dict = {}
    while ticket not in found:
        found |= pool.answers(60.0)
    assert found.keys() == {ticket} and found[ticket].value == {"messages": [{"role": "user", "content": "9+9="}]}
    pool.finish(row)
    before = pool._num_rows
    answers = pool.first_messages([ahead[1], {"question": "4+4="}, ahead[0]])
    assert [answer.value["messages"][0]["content"] for answer in answers] == ["2+2=", "4+4=", "1+1="]
    assert pool._num_rows == before + 1 and pool._ahead == {} and pool._kept == {}
    pool.close()


def test_answers_that_are_set_aside_are_for_those_who_asked(pool: EnvironmentPool) -> None:
    """Others ask meanwhile, for rows of their own and for what rows begin with."""
    [early, late, other] = started(pool, 3)
    tickets = [pool.call(early, turn(early, "pid")), pool.call(late, turn(late, "half"))]
    pool.set_aside(tickets)
    assert [answer.problem for answer in pool.first_messages([ROW] * 4)] == [""] * 4
    [answer] = said(pool, [other], "pid")
    assert answer.value["reward"][0] > 0 and pool.answers(0.0) == {}
    pool.take_back(tickets)
    first, second = answers(pool, tickets)
    assert first.value["reward"][0] > 0 and second.value["reward"] == [0.0]


def test_rows_that_are_left_at_the_end_are_closed(pool: EnvironmentPool, tmp_path: Path) -> None:
    rows, begun = started(pool, 3), time.monotonic()
    for row in rows:
        said(pool, [row], f"close {tmp_path / str(row)}")
    pool.finish_all([*rows, None])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, rows))
    assert time.monotonic() - begun < 5, "nobody waits longer than the processes take"
