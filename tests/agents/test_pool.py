"""Agents in real worker processes: many rows beside each other, and what becomes of those that do not end."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.environments.agents import PREPARE, agent_file
from hybridflow.environments.pool import AgentPool
from hybridflow.errors import RewardError
from hybridflow.rewards.pool import Answer

pytestmark = pytest.mark.slow  # starts Python a few times

HERE = "tests.agents.test_pool"


class Wild(BaseException):
    """What no `except Exception` takes."""


async def leaving() -> None:
    sys.exit("nothing to do")


async def does(base_url: str, row: dict[str, Any]) -> Any:
    """What the URL says."""
    match base_url:
        case "wait":
            await asyncio.sleep(0.5)
        case "stay":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
        case "later":
            await asyncio.sleep(8)
        case "hang":
            await asyncio.sleep(600)
        case "pid":
            return float(os.getpid())
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit("nothing to do")
        case "leave in a task":
            task = asyncio.create_task(leaving())
            await asyncio.sleep(0.1)
            await task
        case "stop":
            asyncio.get_running_loop().stop()
        case "wild":
            raise Wild("away")
        case "print":
            print(f"seen {row['n']}")
        case "parts":
            return {"a": 1.0, "b": 2.0}
    return float(row["n"])


def pool_of(**more: Any) -> AgentPool:
    config = EnvironmentConfig(**{"agent": f"{HERE}:does", "num_workers": 2, "concurrency": 8, **more})
    return AgentPool(config, agent_file(config.path, {}), ScoringConfig(), num_ranks=1)


@pytest.fixture()
def pool() -> Iterator[AgentPool]:
    made = pool_of()
    yield made
    made.close()


def answers(pool: AgentPool, tickets: list[int], seconds: float = 60.0) -> list[Answer]:
    found: dict[int, Answer] = {}
    until = time.monotonic() + seconds
    while not all(ticket in found for ticket in tickets):
        assert time.monotonic() < until, "no answer has come"
        found |= pool.answers(1.0)
    return [found[ticket] for ticket in tickets]


def run(pool: AgentPool, what: str, count: int) -> tuple[list[int], list[int]]:
    """Rows and tickets."""
    both = [pool.run(what, {"n": n}) for n in range(count)]
    return [row for row, _ in both], [ticket for _, ticket in both]


def test_rows_of_a_process_run_beside_each_other(pool: AgentPool) -> None:
    answers(pool, run(pool, "", 2)[1])
    begun = time.monotonic()
    found = answers(pool, run(pool, "wait", 16)[1])
    assert [answer.value["reward"] for answer in found] == [[float(n)] for n in range(16)]
    assert time.monotonic() - begun < 16 * 0.5 / 2 and pool.most_at_once == 16


def test_a_process_starts_before_its_rows(pool: AgentPool) -> None:
    """Each of them, once; rows then come to the same processes."""
    assert len(pool.start_processes()) == 2 and pool.start_processes() == []
    begun = time.monotonic()
    pids = {answer.value["reward"][0] for answer in answers(pool, run(pool, "pid", 8)[1])}
    assert len(pids) == 2 and time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("leave", "the agent raised SystemExit: nothing to do"),
        ("leave in a task", "the agent raised SystemExit: nothing to do"),
        ("wild", "raised Wild: away"),
        ("stop", ""),
    ],
)
def test_an_agent_that_leaves_takes_no_other_row_along(what: str, problem: str, pool: AgentPool) -> None:
    """Others of its process go on, and the process is the same afterwards."""
    before = {answer.value["reward"][0] for answer in answers(pool, run(pool, "pid", 8)[1])}
    others, odd = run(pool, "wait", 8)[1], run(pool, what, 4)[1]
    found = answers(pool, [*odd, *others])  # which come in any order
    assert [answer.problem for answer in found[:4]] == [problem] * 4
    assert [answer.value["reward"] for answer in found[4:]] == [[float(n)] for n in range(8)]
    assert {answer.value["reward"][0] for answer in answers(pool, run(pool, "pid", 8)[1])} == before


async def prepared(base_url: str, row: dict[str, Any], word: str) -> float:
    return 1.0


async def _fails(word: str) -> None:
    print("loading")
    raise RewardError(f"no {word}")


setattr(prepared, PREPARE, _fails)


def test_what_an_agent_needs_and_does_not_get_ends_the_run() -> None:
    config = EnvironmentConfig(agent=f"{HERE}:prepared", arguments={"word": "taskset"}, num_workers=2)
    pool = AgentPool(config, agent_file(config.path, config.arguments), ScoringConfig(), num_ranks=1)
    with pytest.raises(RewardError, match=r"prepared: a process for agents does not start: .*no taskset"):
        pool.start_processes()
    pool.close()


def test_rows_are_dealt_evenly(pool: AgentPool) -> None:
    pids = [answer.value["reward"][0] for answer in answers(pool, run(pool, "pid", 8)[1])]
    assert sorted(pids.count(pid) for pid in set(pids)) == [4, 4]


def test_an_agent_that_is_ended_is_cancelled(pool: AgentPool) -> None:
    [row], tickets = run(pool, "hang", 1)
    pool.finish(row)
    [found] = answers(pool, tickets, 20)
    assert found.problem == "the agent raised CancelledError: "
    assert answers(pool, run(pool, "", 4)[1])[3].value == {"reward": [3.0]}


def test_one_that_does_not_end_is_left_alone_and_harms_no_other_row() -> None:
    """Longer than the supervisor waited once, 7 s: the process stays, and the rows beside that one go on."""
    pool = pool_of(num_workers=1, call_seconds=0.5)
    pid = answers(pool, run(pool, "pid", 1)[1])[0].value
    [row], stays = run(pool, "stay", 1)
    _, others = run(pool, "later", 2)
    answers(pool, run(pool, "wait", 1)[1])  # it has begun
    pool.finish(row)
    all_of, printed = pool.answers, list[str]()

    def noted(seconds: float | None) -> dict[int, Answer]:
        found = all_of(seconds)
        printed.extend(answer.printed for answer in found.values())
        return found

    pool.answers = noted  # type: ignore[method-assign]
    found = answers(pool, [*stays, *others], 60)
    assert [answer.value for answer in found] == [{}, {"reward": [0.0]}, {"reward": [1.0]}]
    assert not any(answer.lost for answer in found)
    assert answers(pool, run(pool, "pid", 1)[1])[0].value == pid
    assert "".join(printed).count("goes on 5 s after its row has ended") == 1
    pool.close()


def test_a_process_that_ends_fails_its_rows_alone(pool: AgentPool) -> None:
    _, others = run(pool, "wait", 2)
    _, ends = run(pool, "exit", 1)
    found = answers(pool, [*others, *ends])
    assert "status 3" in found[2].problem and [answer.lost for answer in found] == [bool(x.problem) for x in found]
    assert sorted(bool(answer.problem) for answer in found[:2]) == [False, True]


def test_what_is_printed_and_what_is_no_reward_is_told() -> None:
    pool = pool_of()
    _, tickets = run(pool, "print", 1)
    [found] = answers(pool, tickets)
    assert found.printed == "seen 0\n" and found.value == {"reward": [0.0]}
    [found] = answers(pool, run(pool, "parts", 1)[1])
    assert found.problem == "the agent returned {'a': 1.0, 'b': 2.0}; expected a finite number as the reward"
    pool.close()
    pool = pool_of(parts={"b": 1.0, "a": 0.5})
    assert answers(pool, run(pool, "parts", 1)[1])[0].value == {"reward": [2.0, 1.0]}
    [found] = answers(pool, run(pool, "", 1)[1])
    assert found.problem == "the agent returned 0.0; data.environment.parts asks for a dictionary of b, a"
    pool.close()
