"""Units by hand: how prompts are cut, and how what is left is dealt out."""

import pytest
import torch

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.roles.precomputed_scores import NOBODY, PrecomputedScores, ScoringUnits, cut_in_units, tokens_of_units


def rollout(lengths: list[int]) -> RolloutBatch:
    sizes, prompts = torch.tensor(lengths), torch.ones(len(lengths), dtype=torch.int64)
    ids, rows = torch.zeros(sum(lengths), dtype=torch.int64), torch.arange(len(lengths))
    return RolloutBatch(ids, sizes, prompts, rows, rows < 0, response_mask(sizes, prompts), torch.zeros(len(ids)))


def test_prompts_are_cut_in_units_of_nearly_equal_cost() -> None:
    """Rows 0-1, 2, 3-5, 6, 7 of prompts 0 to 4; the dearest prompt of a replica has a unit by itself."""
    units = cut_in_units([[0, 2, 3], [1, 4]], [2, 1, 3, 1, 1], [5, 9, 9, 4, 1], per_replica=2, num_shares=1)
    assert units == ScoringUnits(rows=((3, 4, 5), (0, 1, 6), (2,), (7,)), replicas=(0, 0, 1, 1))
    assert (units.of_replica(0), units.of_replica(1)) == ([0, 1], [2, 3])


def test_a_prompt_is_a_unit_at_least() -> None:
    units = cut_in_units([[0], [], [1]], [4, 4], [1, 1], per_replica=8, num_shares=2)
    assert units == ScoringUnits(rows=((0, 1, 2, 3), (4, 5, 6, 7)), replicas=(0, 2))


@pytest.mark.parametrize(
    ("num_prompts", "num_shares", "most", "expected"),
    [(8, 8, 16, 1), (64, 4, 8, 1), (6, 4, 8, 2), (9, 4, 8, 2), (5, 4, 8, 3), (4, 8, 8, 2), (1, 8, 4, 4), (3, 2, 1, 1)],
)
def test_a_prompt_is_cut_where_shares_would_be_unlike(
    num_prompts: int, num_shares: int, most: int, expected: int
) -> None:
    """Of 5 prompts for 4, the busiest has 2 of 1.25, 3 of 2.5 or, in thirds, 4 of 3.75."""
    units = cut_in_units(
        [range(num_prompts)], [most] * num_prompts, [most] * num_prompts, per_replica=99, num_shares=num_shares
    )
    assert len(units) == num_prompts * expected
    assert [row for rows in sorted(units.rows) for row in rows] == list(range(num_prompts * most))
    assert max(map(len, units.rows)) - min(map(len, units.rows)) <= 1


def test_what_nobody_has_run_is_balanced_by_its_tokens() -> None:
    ahead = PrecomputedScores(ScoringUnits(rows=((0, 3), (1,), (2,), (4,)), replicas=(0, 0, 1, 1)))
    batch = rollout([4, 3, 6, 1, 2])
    tokens = tokens_of_units(batch, ahead.units)
    assert tokens == [5, 3, 6, 2]
    assert not ahead.covers(batch)
    ahead.assign_rest(batch, [NOBODY, NOBODY, NOBODY, NOBODY], 2, tokens)
    assert (ahead.rows_left(0), ahead.rows_left(1)) == ([[2], [4]], [[0, 3], [1]])
    assert ahead.covers(batch) and not ahead.covers(rollout([4, 3, 6, 1, 2]))
    ahead.assign_rest(batch, [1, NOBODY, 0, NOBODY], 2, tokens)
    assert (ahead.rows_left(0), ahead.rows_left(1)) == ([[1]], [[4]])
    ahead.assign_rest(batch, [1, 0, 0, 1], 2, tokens)
    assert ahead.rows_left(0) == ahead.rows_left(1) == []


def test_units_without_some_rows_keep_their_numbers() -> None:
    """Rows 3 and 1 are not asked for: unit 1 is empty, and nobody has anything to run for it."""
    units = ScoringUnits(rows=((0, 3), (1,), (2,), (4,)), replicas=(0, 0, 1, 1)).without([3, 1])
    assert units == ScoringUnits(rows=((0,), (), (2,), (4,)), replicas=(0, 0, 1, 1))
    ahead, batch = PrecomputedScores(units), rollout([4, 3, 6, 1, 2])
    tokens = tokens_of_units(batch, units)
    assert tokens == [4, 0, 6, 2]
    ahead.assign_rest(batch, [NOBODY, NOBODY, NOBODY, NOBODY], 2, tokens)
    assert sorted(row for share in (ahead.rows_left(0), ahead.rows_left(1)) for rows in share for row in rows) == [
        0,
        2,
        4,
    ]
    assert ahead.covers(batch, torch.tensor([4, 0, 2]))
    assert not ahead.covers(batch) and not ahead.covers(batch, torch.tensor([0, 1, 2]))
