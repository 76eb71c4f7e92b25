"""What the first rank of a replica tells the others before a step of the engine."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from hybridflow.rollout.engine import Request
from hybridflow.rollout.turns import Agreement, Reply, _Row
from tests.launch import run_ranks
from tests.rollout.turns_worker import LISTS


@pytest.mark.distributed
def test_replies_are_the_same_on_all_ranks_however_long(tmp_path: Path) -> None:
    run_ranks(2, "tests.rollout.turns_worker", tmp_path / "told.json")
    expected = json.loads(json.dumps([[asdict(reply) for reply in replies] for replies in LISTS]))
    assert json.loads((tmp_path / "told.json").read_text()) == [[expected, [3, 1, 2]]] * 2


def test_one_rank_asks_nobody() -> None:
    alone = Agreement(None, 0, torch.device("cpu"))
    assert alone.leads and alone.on_all(LISTS[1]) == LISTS[1] and alone.numbers([4], 1) == [4]


def test_a_turn_continues_the_tokens_with_a_seed_of_its_own() -> None:
    row = _Row(Request([1, 2], seed=7, bucket=1))
    first = row.next_request()
    row.add([3, 4], [-0.1, -0.2])
    row.add([5])
    second = row.next_request()
    row.add([6], [-0.3])
    third = row.next_request()
    assert (first.prompt, second.prompt, third.prompt) == ([1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert len({first.seed, second.seed, third.seed}) == 3 and first.seed == 7 and second.bucket == 1
    found = row.response(Reply(0, ends=True, truncated=True, rewards=(1.0,)))
    assert found.token_ids == [3, 4, 5, 6] and found.sampled == [True, True, False, True] and found.truncated
    assert found.log_probs == [-0.1, -0.2, 0.0, -0.3] and found.rewards == (1.0,)


def test_a_turn_that_is_dropped_takes_along_what_was_written_before_it() -> None:
    """And the next has a seed of its own."""
    row = _Row(Request([1], seed=7))
    first = row.next_request()
    row.add([3], [-0.1])
    row.kept = 1
    row.add([4])
    second = row.next_request()
    row.add([5], [-0.2])
    row.drop()
    assert (row.token_ids, row.log_probs, row.sampled) == ([3], [-0.1], [True]) and not row.speaks
    row.add([6])
    third = row.next_request()
    assert third.prompt == [1, 3, 6] and row.speaks and len({first.seed, second.seed, third.seed}) == 3


def test_nothing_of_a_failed_row_is_the_policys() -> None:
    row = _Row(Request([1], seed=7))
    row.add([3, 4], [-0.1, -0.2])
    found = row.response(Reply(0, ends=True, failed=True, rewards=(float("nan"),)))
    assert found.sampled == [False, False] and found.log_probs == [0.0, 0.0] and found.token_ids == [3, 4]
