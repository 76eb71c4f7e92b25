"""What the first rank of a replica tells the others before a step of the engine."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from hybridflow.rollout.engine import Request
from hybridflow.rollout.turns import LeaderBroadcast, TurnEvent, _Row
from tests.launch import run_ranks
from tests.rollout.turns_worker import LISTS


@pytest.mark.distributed
def test_replies_are_the_same_on_all_ranks_however_long(tmp_path: Path) -> None:
    run_ranks(2, "tests.rollout.turns_worker", tmp_path / "told.json")
    expected = json.loads(json.dumps([[asdict(reply) for reply in replies] for replies in LISTS]))
    assert json.loads((tmp_path / "told.json").read_text()) == [[expected, [3, 1, 2]]] * 2


def test_one_rank_asks_nobody() -> None:
    alone = LeaderBroadcast(None, 0, torch.device("cpu"))
    assert alone.leads and alone.on_all(LISTS[1]) == LISTS[1] and alone.numbers([4], 1) == [4]


def test_a_turn_continues_the_tokens_with_a_seed_of_its_own() -> None:
    row = _Row(Request([1, 2], seed=7, bucket=1))
    first = row.next_request(0)
    row.branches[0].add([3, 4], [-0.1, -0.2])
    row.write(0, [5])
    second = row.next_request(0)
    row.branches[0].add([6], [-0.3])
    third = row.next_request(0)
    assert (first.prompt, second.prompt, third.prompt) == ([1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert len({first.seed, second.seed, third.seed}) == 3 and first.seed == 7 and second.bucket == 1
    found = row.response(TurnEvent(0, ends=True, truncated=True, rewards=(1.0,)))
    assert found.token_ids == [3, 4, 5, 6] and found.sampled == [True, True, False, True] and found.truncated
    assert found.log_probs == [-0.1, -0.2, 0.0, -0.3] and found.rewards == (1.0,) and found.branch_starts == ()


@pytest.mark.parametrize("several", [False, True])
def test_a_turn_that_is_dropped_takes_along_what_was_written_before_it(several: bool) -> None:
    """And what is asked then is asked as if there had been no such turn, under a name of its own."""
    row, other = (_Row(Request([1], seed=7), several=several) for _ in range(2))
    for its in (row, other):
        its.next_request(0)
        its.branches[0].add([3], [-0.1])
    branch = row.branches[0]
    row.write(0, [4])
    row.next_request(0)
    branch.add([5], [-0.2])
    row.drop(0)
    assert (branch.token_ids, branch.log_probs, branch.sampled) == ([3], [-0.1], [True]) and not branch.speaks
    for token in (6, 4):
        row.write(0, [token])
        other.write(0, [token])
        asked, expected = row.next_request(0), other.next_request(0)
        assert asked == expected and asked.prompt == [1, 3, token] and branch.speaks
        assert branch.asked == other.branches[0].asked + 1
        for its in (row, other):
            its.branches[0].add([5], [-0.2])
            its.drop(0)


def test_nothing_of_a_failed_row_is_the_policys() -> None:
    row = _Row(Request([1], seed=7))
    row.branches[0].add([3, 4], [-0.1, -0.2])
    row.write(1, [8, 9])
    row.branches[1].add([5], [-0.3])
    found = row.response(TurnEvent(0, ends=True, failed=True, rewards=(float("nan"),)))
    assert found.sampled == [False, False] and found.log_probs == [0.0, 0.0] and found.token_ids == [3, 4]
    assert found.branch_starts == ()


def row_of(*order: int, prompt: bool = True) -> tuple[_Row, dict[int, int]]:
    """Branches begin in this order, each with its number twice, or three times from 30 on; their seeds by number.

    prompt: before them one begins with the row's prompt.
    """
    row = _Row(Request([1, 2] if prompt else [], seed=7), several=True)
    seeds = {}
    if prompt:
        row.next_request(0)
        row.branches[0].add([3], [-0.1])
    for place, number in enumerate(order, int(prompt)):
        row.write(place, [number] * (2 if number < 30 else 3))
        seeds[number] = row.next_request(place).seed
        row.branches[place].add([number + 1], [-number / 10])
    return row, seeds


def test_branches_have_seeds_and_an_order_that_no_clock_decides() -> None:
    (row, seeds), (other, others) = row_of(30, 20, 10), row_of(10, 30, 20)
    assert seeds == others and len(set(seeds.values())) == 3
    found = row.response(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found == other.response(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found.token_ids == [3, 10, 10, 11, 20, 20, 21, 30, 30, 30, 31] and found.branch_starts == (1, 4, 7)
    assert found.sampled == [True, *[False, False, True] * 2, False, False, False, True]
    assert found.log_probs == [-0.1, 0, 0, -1.0, 0, 0, -2.0, 0, 0, 0, -3.0]


def test_so_have_those_of_a_row_without_a_prompt() -> None:
    (row, seeds), (other, others) = row_of(30, 20, 10, prompt=False), row_of(10, 30, 20, prompt=False)
    assert seeds == others
    found = row.response(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found == other.response(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found.token_ids == [10, 10, 11, 20, 20, 21, 30, 30, 30, 31] and found.branch_starts == (3, 6)


def test_a_fork_draws_the_same_whoever_comes_first() -> None:
    """Two requests go on from one turn: one in the sequence that has it, one in a new one that begins with the same."""
    seeds = []
    for order in ((5, 6), (6, 5)):
        row = _Row(Request([1], seed=7), several=True)
        row.next_request(0)
        row.branches[0].add([3], [-0.1])
        row.write(0, [order[0]])
        row.write(1, [1, 3, order[1]])
        asked = [row.next_request(0), row.next_request(1)]
        seeds.append({request.prompt[-1]: request.seed for request in asked})
        assert [request.prompt for request in asked] == [[1, 3, token] for token in order]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 2


def test_equal_branches_draw_otherwise() -> None:
    row, seeds = row_of(20)
    row.write(2, [20, 20])
    assert row.next_request(2).seed != seeds[20]


def test_nor_does_one_that_is_asked_again_draw_as_an_equal_one() -> None:
    """The first of two equal ones is dropped and asked again: it draws what it would have drawn."""
    row, seeds = row_of(20)
    row.write(2, [20, 20])
    second = row.next_request(2).seed
    row.drop(1)
    row.write(1, [20, 20])
    assert row.next_request(1).seed == seeds[20] != second


def test_a_branch_without_an_answer_is_left_out() -> None:
    row, _ = row_of(20)
    row.write(2, [9])
    row.next_request(2)
    row.drop(2)
    assert row.response(TurnEvent(0, ends=True, rewards=(1.0,))).branch_starts == (1,)


def test_a_row_without_a_prompt_begins_with_a_branch_that_has_an_answer() -> None:
    row = _Row(Request([], seed=7), several=True)
    row.write(0, [4, 5])
    row.next_request(0)
    row.drop(0)
    row.write(1, [6, 7])
    assert row.next_request(1).prompt == [6, 7]
    row.branches[1].add([8], [-0.5])
    found = row.response(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert (found.token_ids, found.sampled, found.branch_starts) == ([6, 7, 8], [False, False, True], ())
