"""Calls in a thread: in order, closed at any moment, and what they raise is raised where the scores are wanted."""

import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from hybridflow.batch import PromptBatch, RolloutBatch, response_mask
from hybridflow.errors import RewardError
from hybridflow.rewards.background import BackgroundCalls, Group, GroupScores
from hybridflow.rewards.functions import RewardFunction
from hybridflow.rewards.scorer import FunctionCaller, PromptCalls
from hybridflow.roles.ahead import NOBODY

GROUPS = [Group(prompt, (2 * prompt, 2 * prompt + 1), ([prompt], [prompt + 1])) for prompt in range(3)]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_calls_come_one_after_the_other_in_another_thread() -> None:
    threads: list[threading.Thread] = []
    seen: list[int] = []

    def call(group: Group) -> GroupScores:
        threads.append(threading.current_thread())
        seen.append(group.prompt)
        return ([0.5 * group.prompt, 1.0],)

    calls = BackgroundCalls(call)
    for group in GROUPS:
        calls.submit(group)
    until(lambda: len(seen) == 3)
    assert calls.results() == {0: ([0.0, 1.0],), 1: ([0.5, 1.0],), 2: ([1.0, 1.0],)}
    assert seen == [0, 1, 2] and len(set(threads)) == 1 and threads[0] is not threading.main_thread()
    assert calls.close() == (0, 1, 2)


def test_after_the_close_no_call_begins_and_the_one_that_runs_counts() -> None:
    goes_on = threading.Event()
    calls = BackgroundCalls(lambda group: (goes_on.wait(30), ([1.0],))[1])
    calls.submit(GROUPS[0])
    calls.submit(GROUPS[1])
    until(lambda: bool(calls._begun))
    assert calls.close() == (0,)
    goes_on.set()
    assert calls.results() == {0: ([1.0],)}


def test_without_a_prompt_there_is_no_thread() -> None:
    calls = BackgroundCalls(lambda group: ())
    assert calls.close() == () and calls.results() == {} and calls._thread is None


def test_what_a_call_raises_is_raised_with_the_results() -> None:
    def call(group: Group) -> GroupScores:
        raise SystemExit(3)

    calls = BackgroundCalls(call)
    calls.submit(GROUPS[0])
    until(lambda: bool(calls._begun))
    with pytest.raises(SystemExit):
        calls.results()


# ---- with functions


def prompt_calls(function: RewardFunction) -> tuple[PromptCalls, RolloutBatch]:
    """Two responses to each of three prompts."""
    prompts = PromptBatch(torch.arange(3), torch.ones(3, dtype=torch.int64), ("a", "b", "c"), {"answer": (7, 8, 9)})
    lengths, ones = torch.full((6,), 2), torch.ones(6, dtype=torch.int64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3])
    indices, mask = torch.arange(3).repeat_interleave(2), response_mask(lengths, ones)
    rollout = RolloutBatch(ids, lengths, ones, indices, indices < 0, mask, torch.zeros(12))
    return PromptCalls([(function, "f")], prompts, FunctionCaller(lambda ids: str(ids[0]), 1, 2)), rollout


def test_a_rank_has_what_it_has_begun_and_its_share_of_the_rest() -> None:
    lists: list[tuple[list[str], list[str]]] = []

    def function(prompts: list[str], responses: list[str], columns: dict[str, list[int]]) -> list[float]:
        lists.append((prompts, responses))
        return [answer + int(response) for answer, response in zip(columns["answer"], responses, strict=True)]

    calls, rollout = prompt_calls(function)
    calls.calls.submit(GROUPS[1])
    until(lambda: bool(lists))
    calls.settle(rollout, [NOBODY, 1, NOBODY])  # of the rest rank 1 of 2 has the second
    (score,) = calls.scores()
    assert (score.size, score.where.tolist(), score.values.tolist()) == (6, [2, 3, 4, 5], [9.0, 10.0, 11.0, 12.0])
    assert lists == [(["b", "b"], ["1", "2"]), (["c", "c"], ["2", "3"])]


def test_the_row_of_an_error_is_named_as_in_the_main_thread() -> None:
    def function(prompts: list[str], responses: list[str], columns: dict[str, list[int]]) -> list[float]:
        return [1 / (int(response) - 2) for response in responses]

    calls, rollout = prompt_calls(function)
    calls.calls.submit(GROUPS[1])
    until(lambda: calls.calls._error is not None)
    calls.settle(rollout, [NOBODY, 1, NOBODY])
    with pytest.raises(RewardError, match=r"reward function f: row 3: raised ZeroDivisionError: .* its prompt is 'b'"):
        calls.scores()


def test_a_function_that_refuses_a_thread_is_called_by_the_main_one() -> None:
    def function(prompts: list[str], responses: list[str], columns: dict[str, list[int]]) -> list[float]:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return [1.0, 2.0]

    calls, rollout = prompt_calls(function)
    calls.calls.submit(GROUPS[1])
    until(lambda: calls.calls.needs_main_thread)
    calls.calls.submit(GROUPS[0])  # nothing begins any more
    calls.settle(rollout, [0, 1, 0])
    (score,) = calls.scores()
    assert (score.where.tolist(), score.values.tolist()) == ([2, 3], [1.0, 2.0])
