"""Which rows a rank has functions called for, in which lists, and what becomes of those that fail."""

import os
import time
from collections.abc import Iterator

import pytest
import torch

from hybridflow.batch import PromptBatch, RolloutBatch, response_mask
from hybridflow.errors import RewardError
from hybridflow.rewards.calls import (
    FunctionCaller,
    FunctionScores,
    Group,
    RolloutCalls,
    groups_of,
    rows_of_prompts,
)
from hybridflow.rewards.pool import Pool
from hybridflow.rewards.probe import described
from hybridflow.roles.precomputed_scores import NOBODY
from tests.counted import CountedOperations
from tests.messages import like
from tests.rewards.pools import pool_of, spec

pytestmark = pytest.mark.slow  # waits for processes

HERE = "tests.rewards.test_calls"
ROW, GROUP, BATCH, PARTS, FAILS = range(5)


def lists(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
    """Ten a row of the call, and the row's own response."""
    return [10.0 * len(prompts) + int(response) for response in responses]


def parts(prompts: list[str], responses: list[str], columns: dict[str, list], *, plus: int) -> list[dict[str, float]]:
    return [{"answer": answer, "more": int(r) + plus} for answer, r in zip(columns["answer"], responses, strict=True)]


def curious(
    prompts: list[str], responses: list[str], columns: dict[str, list], *, token_ids: list[list[int]], iteration: int,
    is_evaluation: bool = False,
) -> list[float]:  # fmt: skip
    """What the function was given beside the texts, as a number."""
    return [100.0 * iteration + 10 * is_evaluation + ids[-1] for ids in token_ids]


def fails(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
    return [1 / (int(response) - 2) for response in responses]


def sleeps_or_fails(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
    if responses[0] == "1" and prompts[0] == "a":
        raise ValueError("no 1")
    time.sleep(0.0 if prompts[0] == "a" else 30.0)
    return [1.0]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    specs = [spec(f"{HERE}:lists", per=per) for per in ("row", "group", "batch")]
    specs += [spec(f"{HERE}:parts", parts=("more", "answer"), arguments={"plus": 5}), spec(f"{HERE}:fails")]
    specs.append(spec(f"{HERE}:curious", asks=("iteration", "is_evaluation", "token_ids")))
    with pool_of(*specs) as pool:
        yield pool


def prompts() -> PromptBatch:
    return PromptBatch(torch.arange(3), torch.ones(3, dtype=torch.int64), ("a", "b", "c"), {"answer": (7, 8, 9)})


def rollout() -> RolloutBatch:
    """Two responses to each of three prompts: 0 and 1, 1 and 2, 2 and 3."""
    lengths, ones = torch.full((6,), 2), torch.ones(6, dtype=torch.int64)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3])
    indices, mask = torch.arange(3).repeat_interleave(2), response_mask(lengths, ones)
    return RolloutBatch(ids, lengths, ones, indices, indices < 0, mask, torch.zeros(12))


def caller(pool: Pool, rank: int = 0, world_size: int = 1, error_score: float | None = None) -> FunctionCaller:
    return FunctionCaller(lambda ids: str(ids[0]), rank, world_size, pool, error_score)


def group(prompt: int) -> Group:
    return Group(prompt, (2 * prompt, 2 * prompt + 1), ([prompt], [prompt + 1]))


def known(scores: FunctionScores) -> list[dict[int, float]]:
    """Of each part, by row."""
    return [dict(zip(x.where.tolist(), x.values.tolist(), strict=True)) for x in scores.parts]


def test_what_is_called_together(pool: Pool) -> None:
    found = [known(caller(pool).scores(number, rollout(), prompts())) for number in (ROW, GROUP, BATCH)]
    assert found[0] == [{0: 10.0, 1: 11.0, 2: 11.0, 3: 12.0, 4: 12.0, 5: 13.0}]
    assert found[1] == [{0: 20.0, 1: 21.0, 2: 21.0, 3: 22.0, 4: 22.0, 5: 23.0}]
    assert found[2] == [{0: 60.0, 1: 61.0, 2: 61.0, 3: 62.0, 4: 62.0, 5: 63.0}]


def test_each_row_is_one_ranks_and_a_whole_batch_is_on_one(pool: Pool) -> None:
    """Of two ranks the first has the prompts 0 and 2; the function of number 2 is the first rank's."""
    ranks = [caller(pool, rank, 2) for rank in (0, 1)]
    assert [list(known(rank.scores(GROUP, rollout(), prompts()))[0]) for rank in ranks] == [[0, 1, 4, 5], [2, 3]]
    assert [list(known(rank.scores(BATCH, rollout(), prompts()))[0]) for rank in ranks] == [[0, 1, 2, 3, 4, 5], []]


def test_parts_come_in_the_order_of_the_config(pool: Pool) -> None:
    scores = caller(pool).scores(PARTS, rollout(), prompts())
    more, answer = known(scores)
    assert more == {0: 5.0, 1: 6.0, 2: 6.0, 3: 7.0, 4: 7.0, 5: 8.0}
    assert answer == {0: 7.0, 1: 7.0, 2: 8.0, 3: 8.0, 4: 9.0, 5: 9.0}


def test_a_failed_row_ends_the_run_or_has_the_score_of_the_config(pool: Pool, capsys) -> None:
    message = (
        "reward function tests.rewards.test_calls:fails: row 3: raised ZeroDivisionError: .* its prompt is 'b', "
        "the response '2'"
    )
    with pytest.raises(RewardError, match=message):
        caller(pool).scores(FAILS, rollout(), prompts())
    scores = caller(pool, error_score=-3.0).scores(FAILS, rollout(), prompts())
    assert known(scores) == [{0: -0.5, 1: -1.0, 2: -1.0, 3: -3.0, 4: -3.0, 5: 1.0}]
    assert scores.failures.values.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert scores.seconds.values.min() >= 0.0 and scores.seconds.where.tolist() == list(range(6))
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2 and shown[0].startswith("[rank 0, tests.rewards.test_calls:fails] scored as -3: reward func")


def hangs_or_ends(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]:
    """The first prompt's responses take too long, the second's end the process."""
    time.sleep(30.0 if prompts[0] == "a" else 0.0)
    if prompts[0] == "b":
        os._exit(3)
    if responses[0] == "3":
        raise ValueError("column 'answer': no answer")
    return [1.0]


@pytest.mark.thorough
def test_a_row_that_is_lost_has_the_score_of_a_function_that_has_one(capsys) -> None:
    """What a function raises of its own is no lost row."""
    path = f"{HERE}:hangs_or_ends"
    with pool_of(spec(path, lost_score=0.0, timeout_seconds=1.5), spec(path, timeout_seconds=1.5)) as pool:
        own = caller(pool)
        assert [own.failure_score(0, kind) for kind in ("timeout", "ended", "error")] == [0.0, 0.0, None]
        assert (
            own.failure_score(1, "timeout") is None and caller(pool, error_score=-1.0).failure_score(0, "ended") == -1
        )
        with pytest.raises(
            RewardError, match=r"row 0: took longer than .*; reward.on_error: score with reward.error_s"
        ):
            own.scores(1, rollout(), prompts())
        with pytest.raises(RewardError, match="row 5: raised ValueError: column 'answer': no answer"):
            own.scores(0, rollout(), prompts())
        capsys.readouterr()
        units = own.begin(0, own.texts(group(0), prompts())) + own.begin(0, own.texts(group(1), prompts()))
        found = own.finish(0, units, 6)
    assert known(found) == [{0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}] and found.failures.values.tolist() == [2.0, 2.0, 1.0, 1.0]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 4 and shown[0].startswith(f"[rank 0, {path}] scored as 0: reward function {path}: row 0: took")


def test_what_ends_the_run_does_not_wait_for_the_rows_behind_it() -> None:
    """The second row fails, the third would take half a minute."""
    with pool_of(spec(f"{HERE}:sleeps_or_fails")) as slow:
        calls = FunctionCaller(lambda ids: str(ids[0]), 0, 1, slow)
        calls.pool.outcome(slow.submit(0, {"prompts": ["a"], "responses": ["0"], "columns": {}, "rows": [0]}))
        started = time.monotonic()
        with pytest.raises(RewardError, match="row 1: raised ValueError: no 1"):
            calls.scores(0, rollout(), prompts())
        assert time.monotonic() - started < 20.0


def test_of_many_failures_the_first_are_shown(pool: Pool, capsys) -> None:
    """Every row: their prompts lack the column."""
    bare = PromptBatch(torch.arange(3), torch.ones(3, dtype=torch.int64), ("a", "b", "c"), {})
    caller(pool, error_score=0.0).scores(PARTS, rollout(), bare)
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(": row ")[1][0] for line in shown[:3]] == ["0", "1", "2"]
    assert shown[3:] == [like("[rank 0, tests.rewards.test_calls:parts] and 3 more calls failed")]


def test_a_rank_has_what_it_has_begun_and_its_share_of_the_rest(pool: Pool) -> None:
    calls = RolloutCalls(caller(pool, 1, 2), [GROUP], prompts())
    calls.submit(group(1))
    pool.outcome(pool.submit(ROW, {"prompts": ["a"], "responses": ["1"], "columns": {}, "rows": [0]}))  # it has begun
    assert calls.close() == (1,)
    own = rollout()
    calls.call_remaining(own, [NOBODY, 1, NOBODY])  # of the rest rank 1 of 2 has the second
    assert calls.covers(own) and not calls.covers(rollout())
    assert known(calls.scores()[GROUP]) == [{2: 21.0, 3: 22.0, 4: 22.0, 5: 23.0}]


def test_what_no_worker_has_begun_goes_to_all_ranks(pool: Pool) -> None:
    """One worker is busy with the first prompt; the second is half begun, the third not at all."""
    with pool_of(spec("tests.rewards.misbehaving:waits_in_all")) as slow:
        calls = RolloutCalls(FunctionCaller(lambda ids: f"0.{ids[0]}", 0, 1, slow), [0], prompts())
        for prompt in (1, 2):
            calls.submit(group(prompt))
        while not slow._outcomes:  # of the first row
            slow._receive()
        assert calls.close() == (1,)
        calls.call_remaining(rollout(), [NOBODY, 0, NOBODY])
        assert known(calls.scores()[0]) == [{row: 1.0 for row in (2, 3, 0, 1, 4, 5)}]


def test_scores_that_nobody_asks_for_are_forgotten() -> None:
    with pool_of(spec(f"{HERE}:lists"), spec(f"{HERE}:fails")) as own:
        calls = RolloutCalls(caller(own), [0, 1], prompts())
        calls.submit(group(0))
        calls.forget()
        assert own._rows == {} and own._outcomes == {}


def test_of_an_error_the_first_row_is_told_whoever_was_first(pool: Pool) -> None:
    calls = RolloutCalls(caller(pool), [FAILS], prompts())
    for prompt in (2, 1, 0):
        calls.submit(group(prompt))
    calls.close()
    calls.call_remaining(rollout(), [0, 0, 0])
    with pytest.raises(RewardError, match="row 3: "):
        calls.scores()
    calls.forget()


def of_pairs(num_rows: int) -> RolloutBatch:
    """Two responses of one token to each prompt, of one token too."""
    ones, rows = torch.ones(num_rows, dtype=torch.int64), torch.arange(num_rows)
    return RolloutBatch(
        input_ids=torch.arange(2 * num_rows),
        lengths=2 * ones,
        prompt_lengths=ones,
        prompt_indices=rows // 2,
        truncated=ones.bool(),
        response_mask=torch.tensor([False, True]).repeat(num_rows),
        rollout_log_probs=torch.zeros(2 * num_rows),
    )


@pytest.mark.parametrize("num_rows", [1_000, 16_000])
def test_groups_of_all_prompts_take_as_much_work_a_row_however_many_there_are(num_rows: int) -> None:
    """All elements of all results of torch's operations: looking for each prompt would make num_rows a prompt."""
    batch = of_pairs(num_rows)
    with CountedOperations() as counted:
        rows = rows_of_prompts(batch)
        groups = list(groups_of(batch, rows))
    assert groups[7] == Group(7, (14, 15), ([29], [31])) and len(groups) == num_rows // 2
    assert counted.elements < 16 * num_rows


def test_a_function_is_given_what_it_asks_for(pool: Pool) -> None:
    """By the names of its parameters: the iteration, whether this is an evaluation, and the tokens of each response."""
    own = caller(pool)
    own.context.iteration = 7
    assert own.scores(5, rollout(), prompts()).parts[0].values.tolist() == [700, 701, 701, 702, 702, 703]
    with own.evaluating():
        found = own.scores(5, rollout(), prompts()).parts[0].values.tolist()
    assert found == [710, 711, 711, 712, 712, 713] and not own.context.is_evaluation


def test_no_tokens_are_kept_where_no_function_asks_for_them() -> None:
    """A call of the whole rollout would hold as many numbers as the rollout has tokens."""
    with pool_of(spec(f"{HERE}:lists", per="batch")) as plain:
        texts = caller(plain).texts(group(1), prompts())
    assert texts["responses"] == ["1", "2"] and texts["token_ids"] == [(), ()]


def test_what_is_asked_for_is_read_from_the_signature() -> None:
    [plain, asks] = described([(f"{HERE}:lists", {}), (f"{HERE}:curious", {"iteration": 3})])
    assert plain.asks == () and asks.asks == ("is_evaluation", "token_ids"), "the config gives the iteration"
