"""What the first rank of a replica tells the others before a step of the engine."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hybridflow.errors import RewardError, Stopped
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout import generation
from hybridflow.rollout.engine import Request
from hybridflow.rollout.row import BEGINS, SAMPLED, RolloutRow
from hybridflow.rollout.rows import EngineCall, ReplicaRows, TurnEvent, TurnRow
from hybridflow.rollout.turns import LeaderBroadcast
from tests.launch import run_ranks
from tests.rollout.turns_worker import LISTS


@pytest.mark.distributed
def test_replies_are_the_same_on_all_ranks_however_long(tmp_path: Path) -> None:
    run_ranks(2, "tests.rollout.turns_worker", tmp_path / "told.json")
    expected = json.loads(json.dumps([[asdict(reply) for reply in replies] for replies in LISTS]))
    assert json.loads((tmp_path / "told.json").read_text()) == [expected] * 2


def test_one_rank_asks_nobody() -> None:
    alone = LeaderBroadcast(None, 0)
    assert alone.leads and alone.on_all(LISTS[1]) == LISTS[1]


def fails() -> None:
    raise RewardError("on purpose")


def never() -> None:
    raise AssertionError("who has failed is asked no more: it may wait for ever")


def test_what_the_first_rank_fails_with_is_raised_with_the_next_events() -> None:
    """By the rank that leads, and that alone knows; nothing is asked of who answers in between."""
    alone = LeaderBroadcast(None, 0)
    assert alone.attempt(lambda: 7) == 7
    alone.attempt(fails)
    alone.attempt(never)
    with pytest.raises(RewardError, match="on purpose") as found:
        alone.on_all([])
    assert found.value.of_replica


@pytest.mark.parametrize(
    ("error", "size", "known"),
    [
        (ValueError("of the engine"), 1, True),
        (RewardError("of one rank"), 2, False),
        (ValueError("of one rank"), 2, False),
        (Stopped("told"), 1, False),
    ],
)
def test_only_errors_of_whole_replicas_wait_for_the_other_ranks(
    error: Exception, size: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of several ranks cannot go on where one of them has failed: the others do not come."""
    met: list[Exception | None] = []
    monkeypatch.setattr(generation, "raise_on_all_ranks", lambda own, group: met.append(own))

    def generate() -> None:
        raise error

    if known:
        assert generation.fail_together(generate, None, None, size=size) is None and met == [error]
        return
    with pytest.raises(type(error)):
        generation.fail_together(generate, None, None, size=size)
    assert not met


def row_record(prompt: list[int], *, several: bool = False) -> TurnRow:
    return TurnRow(0, 0, Request(prompt, seed=7, bucket=1), several=several)


def sampled(row: RolloutRow) -> list[bool]:
    return [bool(flag & SAMPLED) for flag in row.flags]


def starts(row: RolloutRow) -> list[int]:
    return [place for place, flag in enumerate(row.flags) if flag & BEGINS]


def asked(row: TurnRow, *token_ids: int, branch: int = 0) -> Request:
    """What the engine is asked once these tokens stand in a sequence."""
    [call] = row.apply(TurnEvent(0, token_ids, max_tokens=9, branch=branch))
    assert call.request is not None and call.max_tokens == 9
    return call.request


def test_a_turn_continues_the_tokens_with_a_seed_of_its_own() -> None:
    row = row_record([1, 2])
    first = asked(row)
    row.hear(0, [3, 4], [-0.1, -0.2])
    second = asked(row, 5)
    row.hear(0, [6], [-0.3])
    third = asked(row)
    assert (first.prompt, second.prompt, third.prompt) == ([1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6])
    assert len({first.seed, second.seed, third.seed}) == 3 and first.seed == 7 and second.bucket == 1
    found = row.finished_row(TurnEvent(0, ends=True, truncated=True, rewards=(1.0,)))
    assert found.token_ids == [3, 4, 5, 6] and sampled(found) == [True, True, False, True] and found.truncated
    assert found.log_probs == [-0.1, -0.2, 0.0, -0.3] and found.rewards == (1.0,) and starts(found) == []


@pytest.mark.parametrize("several", [False, True])
def test_a_turn_that_is_dropped_takes_along_what_was_written_before_it(several: bool) -> None:
    """And what is asked then is asked as if there had been no such turn, under a name of its own."""
    row, other = (row_record([1], several=several) for _ in range(2))
    for each in (row, other):
        asked(each)
        each.hear(0, [3], [-0.1])
    first = row.branches[0]
    asked(row, 4)
    row.hear(0, [5], [-0.2])
    assert row.apply(TurnEvent(0, drops=True)) == [], "the engine has ended that turn"
    assert (first.token_ids, first.log_probs, first.flags) == ([3], [-0.1], bytearray([SAMPLED])) and not first.speaks
    for token in (6, 4):
        again, expected = asked(row, token), asked(other, token)
        assert again == expected and again.prompt == [1, 3, token] and first.speaks
        assert first.num_requests == other.branches[0].num_requests + 1
        assert row.apply(TurnEvent(0, drops=True)) == [EngineCall(f"0.0.{first.num_requests}")]
        other.apply(TurnEvent(0, drops=True))
    assert (first.token_ids, row.turn) == ([3], 1)


def test_the_end_of_a_row_aborts_what_the_engine_is_at() -> None:
    row = row_record([1, 2])
    asked(row)
    row.hear(0, [3], [-0.1])
    asked(row, 9, branch=1)
    assert row.apply(TurnEvent(0, (4,), ends=True, drops=True)) == [EngineCall("0.1.1")]
    assert row.branches[0].token_ids == [3, 4] and row.branches[1].token_ids == []


def test_turns_that_the_engine_has_are_counted() -> None:
    rows = ReplicaRows(several=True)
    rows.admit([Request([1], seed=7), Request([1], seed=8)], [4, 6])
    for event in (TurnEvent(0), TurnEvent(1), TurnEvent(1, (5,), branch=1)):
        rows.apply(event)
    assert rows.num_speaking == 3 and [record.of_rollout for record in rows.records] == [4, 6]
    rows.hear(1, 0, [3], [-0.1])
    assert rows.num_speaking == 2
    rows.apply(TurnEvent(1, ends=True, drops=True))
    assert (rows.num_speaking, rows.num_dropped) == (1, 1)
    assert [len(calls) for _, calls in rows.take_events()] == [1, 1, 1, 1] and not rows.has_events


def test_nothing_of_a_failed_row_is_the_policys() -> None:
    row = row_record([1])
    asked(row)
    row.hear(0, [3, 4], [-0.1, -0.2])
    asked(row, 8, 9, branch=1)
    row.hear(1, [5], [-0.3])
    found = row.finished_row(TurnEvent(0, ends=True, failed=True, rewards=(float("nan"),)))
    assert sampled(found) == [False, False] and found.log_probs == [0.0, 0.0] and found.token_ids == [3, 4]
    assert starts(found) == []


def row_of(*order: int, prompt: bool = True) -> tuple[TurnRow, dict[int, int]]:
    """Sequences begin in this order, each with its number twice, or three times from 30 on; their seeds by number.

    prompt: before them one begins with the row's prompt.
    """
    row = row_record([1, 2] if prompt else [], several=True)
    seeds = {}
    if prompt:
        asked(row)
        row.hear(0, [3], [-0.1])
    for place, number in enumerate(order, int(prompt)):
        seeds[number] = asked(row, *[number] * (2 if number < 30 else 3), branch=place).seed
        row.hear(place, [number + 1], [-number / 10])
    return row, seeds


def test_branches_have_seeds_and_an_order_that_no_clock_decides() -> None:
    (row, seeds), (other, others) = row_of(30, 20, 10), row_of(10, 30, 20)
    assert seeds == others and len(set(seeds.values())) == 3
    found = row.finished_row(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found == other.finished_row(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found.token_ids == [3, 10, 10, 11, 20, 20, 21, 30, 30, 30, 31] and starts(found) == [1, 4, 7]
    assert sampled(found) == [True, *[False, False, True] * 2, False, False, False, True]
    assert found.log_probs == [-0.1, 0, 0, -1.0, 0, 0, -2.0, 0, 0, 0, -3.0]


def test_so_have_those_of_a_row_without_a_prompt() -> None:
    (row, seeds), (other, others) = row_of(30, 20, 10, prompt=False), row_of(10, 30, 20, prompt=False)
    assert seeds == others
    found = row.finished_row(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found == other.finished_row(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found.token_ids == [10, 10, 11, 20, 20, 21, 30, 30, 30, 31] and starts(found) == [3, 6]


def test_a_fork_draws_the_same_whoever_comes_first() -> None:
    """Two requests go on from one turn: one in the sequence that has it, one in a new one that begins with the same."""
    seeds = []
    for order in ((5, 6), (6, 5)):
        row = row_record([1], several=True)
        asked(row)
        row.hear(0, [3], [-0.1])
        requests = [asked(row, order[0]), asked(row, 1, 3, order[1], branch=1)]
        seeds.append({request.prompt[-1]: request.seed for request in requests})
        assert [request.prompt for request in requests] == [[1, 3, token] for token in order]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 2


def test_equal_branches_draw_otherwise() -> None:
    row, seeds = row_of(20)
    assert asked(row, 20, 20, branch=2).seed != seeds[20]


def test_nor_does_one_that_is_asked_again_draw_as_an_equal_one() -> None:
    """The first of two equal ones is dropped and asked again: it draws what it would have drawn."""
    row, seeds = row_of(20)
    second = asked(row, 20, 20, branch=2).seed
    row.apply(TurnEvent(0, drops=True, branch=1))
    assert asked(row, 20, 20, branch=1).seed == seeds[20] != second


def test_a_branch_without_an_answer_is_left_out() -> None:
    row, _ = row_of(20)
    asked(row, 9, branch=2)
    row.apply(TurnEvent(0, drops=True, branch=2))
    assert starts(row.finished_row(TurnEvent(0, ends=True, rewards=(1.0,)))) == [1]


def test_a_turn_that_a_stop_cuts_goes_on_with_a_seed_of_the_part() -> None:
    """The engine reads all tokens of the row; the limits count over the parts, and a version is a token's own."""
    rows = ReplicaRows()
    rows.admit([Request([1, 2], seed=7, bucket=1)], [0])
    row = rows[0]
    rows.apply(TurnEvent(0, max_tokens=9))
    rows.hear(0, 0, [3], [-0.1])
    rows.apply(TurnEvent(0, (4,), max_tokens=9))
    [*_, (_, [asked])] = rows.take_events()
    assert asked.request is not None
    seeds = [7, asked.request.seed]
    rows[0].hear(0, [5, 6], [-0.2, -0.3], ends=False)
    rows.go_on(1)
    for spoken, prompt in ((2, [1, 2, 3, 4, 5, 6]), (2, [1, 2, 3, 4, 5, 6]), (3, [1, 2, 3, 4, 5, 6, 8])):
        [call] = row.resumed()
        assert call.request is not None and (call.name, call.max_tokens) == ("0.0.2", 9 - spoken)
        assert (call.request.prompt, call.request.num_before, call.request.bucket) == (prompt, spoken, 1)
        seeds.append(call.request.seed)
        rows[0].hear(0, [8] if len(seeds) == 4 else [], [-0.4] if len(seeds) == 4 else [], ends=False)
    assert seeds[2] == request_seed(asked.request.seed, 0, 1) and len(set(seeds)) == 5
    rows.go_on(2)
    rows.hear(0, 0, [9], [-0.5])
    assert row.resumed() == [] and rows.num_speaking == 0 and row.turn == 2
    found = row.finished_row(TurnEvent(0, ends=True, rewards=(1.0,)))
    assert found.token_ids == [3, 4, 5, 6, 8, 9] and found.log_probs == [-0.1, 0.0, -0.2, -0.3, -0.4, -0.5]
    assert found.versions == [0, 0, 0, 0, 1, 2] and sampled(found) == [True, False, True, True, True, True]


def test_a_turn_that_is_dropped_goes_with_all_parts() -> None:
    row = row_record([1], several=True)
    first = asked(row)
    row.hear(0, [3], [-0.1], ends=False)
    row.version = 1
    [resumed] = row.resumed()
    assert resumed.request is not None and resumed.request.seed == request_seed(first.seed, 0, 1)
    assert row.apply(TurnEvent(0, drops=True)) == [EngineCall("0.0.1")]
    assert row.branches[0].token_ids == row.branches[0].versions == [] and row.resumed() == []
    again = asked(row)
    assert (again, again.num_before) == (first, 0) and row.branches[0].calls == 0
