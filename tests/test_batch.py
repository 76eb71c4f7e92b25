"""Packed batches against loops over plain lists, and the pure functions that split them."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from hybridflow.batch import (
    PromptBatch,
    RolloutBatch,
    Tokens,
    balanced_partition,
    joined,
    offsets,
    response_mask,
    token_index,
)
from hybridflow.flows.ppo import PPOBatchWithReference

LENGTHS = [3, 5, 1, 4]
PROMPT_LENGTHS = [2, 1, 1, 2]
TOKEN_FIELDS = [
    *["input_ids", "response_mask", "rollout_log_probs", "log_probs", "ref_log_probs"],
    *["values", "rewards", "advantages", "returns"],
]
SCORES = {"raw_scores": torch.tensor([3.0, 1.0, 7.0, 5.0]), "scores": torch.tensor([0.5, -1.0, 2.0, 0.0])}
SEQUENCE_FIELDS = ["lengths", "prompt_lengths", "prompt_indices", "truncated", "raw_scores", "scores"]


def rollout_fields() -> dict[str, torch.Tensor]:
    lengths, prompt_lengths = torch.tensor(LENGTHS), torch.tensor(PROMPT_LENGTHS)
    return {
        "input_ids": torch.arange(100, 113),
        "lengths": lengths,
        "prompt_lengths": prompt_lengths,
        "prompt_indices": torch.tensor([0, 0, 1, 1]),
        "truncated": torch.tensor([False, True, False, False]),
        "response_mask": response_mask(lengths, prompt_lengths),
        "rollout_log_probs": -torch.arange(13.0) / 10,
    }


def rollout_batch() -> RolloutBatch:
    return RolloutBatch(**rollout_fields())


def train_batch() -> PPOBatchWithReference:
    """Every field holds other numbers, so that a mix-up shows."""
    names = ["log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns"]
    tokens = {name: 1000.0 * (i + 1) + torch.arange(13.0) for i, name in enumerate(names)}
    return PPOBatchWithReference(
        **rollout_fields(),
        raw_scores=torch.tensor([3.0, 1.0, 7.0, 5.0]),
        scores=torch.tensor([0.5, -1.0, 2.0, 0.0]),
        **tokens,
    )


def rows_of(batch: RolloutBatch, name: str) -> list:
    """A field as one entry a sequence: a number, or the list of its tokens' numbers."""
    field = getattr(batch, name)
    if name in SEQUENCE_FIELDS:
        return field.tolist()
    return [part.tolist() for part in field.split(batch.lengths.tolist())]


# ------------------------------------------------------------------------------------------------ packed tensors


def test_prompt_batch_gives_token_lists() -> None:
    batch = PromptBatch(
        input_ids=torch.tensor([5, 6, 7, 8]), lengths=torch.tensor([1, 3]), texts=("a", "b"), columns={}
    )
    assert batch.token_lists() == [[5], [6, 7, 8]]
    assert len(batch) == 2


def test_offsets_are_where_sequences_start() -> None:
    assert offsets(torch.tensor(LENGTHS)).tolist() == [0, 3, 8, 9]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([0, 1, 2, 3], list(range(13))),
        ([2], [8]),
        ([3, 0], [9, 10, 11, 12, 0, 1, 2]),
        ([1, 1], [3, 4, 5, 6, 7, 3, 4, 5, 6, 7]),
        ([], []),
    ],
)
def test_token_index_is_the_tokens_of_the_rows(rows: list[int], expected: list[int]) -> None:
    index = token_index(torch.tensor(LENGTHS), torch.tensor(rows, dtype=torch.int64))
    assert index.dtype == torch.int64
    assert index.tolist() == expected


def test_token_index_skips_empty_sequences() -> None:
    assert token_index(torch.tensor([2, 0, 3]), torch.tensor([1, 2, 0])).tolist() == [2, 3, 4, 0, 1]


def test_response_mask_starts_after_the_prompt() -> None:
    mask = response_mask(torch.tensor(LENGTHS), torch.tensor(PROMPT_LENGTHS))
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1]


def test_select_takes_every_field_in_the_order_of_the_rows() -> None:
    batch = train_batch()
    rows = [3, 1, 3]
    chosen = batch.select(torch.tensor(rows))
    assert isinstance(chosen, PPOBatchWithReference)
    assert len(chosen) == 3
    for name in [*TOKEN_FIELDS, *SEQUENCE_FIELDS]:
        whole = rows_of(batch, name)
        assert rows_of(chosen, name) == [whole[row] for row in rows], name
        assert getattr(chosen, name).dtype == getattr(batch, name).dtype, name


def test_select_keeps_the_kind_and_the_original() -> None:
    batch = rollout_batch()
    assert type(batch.select(torch.tensor([1]))) is RolloutBatch
    chosen = batch.select(torch.arange(4))
    chosen.input_ids.zero_()
    assert batch.input_ids.tolist() == list(range(100, 113))


def test_selecting_back_and_forth_is_the_identity() -> None:
    batch, order = train_batch(), torch.tensor([2, 0, 3, 1])
    again = batch.select(order).select(order.argsort())
    for name in [*TOKEN_FIELDS, *SEQUENCE_FIELDS]:
        assert torch.equal(getattr(again, name), getattr(batch, name)), name


def test_selecting_nothing_gives_an_empty_batch() -> None:
    empty = train_batch().select(torch.empty(0, dtype=torch.int64))
    assert len(empty) == 0
    assert empty.input_ids.shape == (0,)


@pytest.mark.parametrize("name", TOKEN_FIELDS + SEQUENCE_FIELDS)
def test_a_field_of_the_wrong_length_fails_with_its_name(name: str) -> None:
    batch = train_batch()
    fields = {field: getattr(batch, field) for field in [*TOKEN_FIELDS, *SEQUENCE_FIELDS]}
    fields[name] = fields[name][:-1]
    with pytest.raises(ValueError) as raised:
        PPOBatchWithReference(**fields)
    if name != "lengths":  # every other one is measured against lengths
        num = 4 if name in SEQUENCE_FIELDS else 13
        assert f"PPOBatchWithReference.{name}: shape ({num - 1},), expected ({num},)" in str(raised.value)


def test_a_field_of_two_dimensions_fails() -> None:
    fields = rollout_fields() | {"rollout_log_probs": torch.zeros(13, 1)}
    with pytest.raises(ValueError, match=r"rollout_log_probs: shape \(13, 1\), expected \(13,\)"):
        RolloutBatch(**fields)


def test_tokens_know_the_rows_that_they_are_of() -> None:
    """Tokens 0 to 2, 3 to 7, 8, and 9 to 12; in any order."""
    tokens = Tokens(train_batch(), torch.tensor([12, 0, 3, 7, 8, 9, 2]), torch.device("cpu"))
    assert tokens.sequences.tolist() == [3, 0, 1, 1, 2, 3, 0]


def test_two_rollouts_are_joined_row_after_row() -> None:
    first, second = rollout_batch(), rollout_batch().select(torch.tensor([2, 0]))
    both = joined(train_batch(), second)
    assert type(both) is RolloutBatch and len(both) == 6
    for rows, part in ((torch.arange(4), first), (torch.tensor([4, 5]), second)):
        taken = both.select(rows)
        assert all(torch.equal(getattr(taken, name), x) for name, x in part.tensors().items())


# ------------------------------------------------------------------------------------------------ partition


def part_costs(costs: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(costs[row] for row in part) for part in parts]


@pytest.mark.parametrize(
    ("costs", "num_parts", "expected"),
    [
        ([5, 4, 3, 2, 1], 1, [[0, 1, 2, 3, 4]]),
        ([1, 2, 3, 4], 2, [[0, 3], [1, 2]]),
        ([7, 7, 7], 3, [[0], [1], [2]]),
        ([2, 2, 2, 2], 2, [[0, 2], [1, 3]]),
        ([10, 1, 1, 1], 2, [[0], [1, 2, 3]]),
        ([0, 0, 0], 3, [[0], [1], [2]]),
        ([3], 2, [[0], []]),
        ([], 2, [[], []]),
    ],
)
def test_partitions_by_hand(costs: list[int], num_parts: int, expected: list[list[int]]) -> None:
    assert balanced_partition(costs, num_parts) == expected


def random_costs(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(1, 500) for _ in range(count)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [8, 9, 64])
def test_partitions_hold_every_row_once_and_no_part_is_empty(num_parts: int, count: int) -> None:
    parts = balanced_partition(random_costs(count, count), num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert all(part == sorted(part) and part for part in parts)


@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_parts_differ_by_no_more_than_one_row(num_parts: int, seed: int) -> None:
    costs = random_costs(seed, 64)
    found = part_costs(costs, balanced_partition(costs, num_parts))
    # the costliest part was the cheapest before it got its last row
    assert max(found) - min(found) <= max(costs)
    assert max(found) <= sum(costs) / num_parts * 1.05


@pytest.mark.parametrize("seed", range(20))
def test_the_costliest_part_is_at_most_four_thirds_of_the_best(seed: int) -> None:
    costs, num_parts = random_costs(seed, 7), 3
    best = min(
        max(part_costs(costs, [[i for i in range(7) if choice[i] == part] for part in range(num_parts)]))
        for choice in itertools.product(range(num_parts), repeat=7)
    )
    assert max(part_costs(costs, balanced_partition(costs, num_parts))) <= best * 4 / 3


def test_a_permutation_of_the_rows_gives_parts_of_the_same_costs() -> None:
    costs = random_costs(1, 40)
    expected = Counter(part_costs(costs, balanced_partition(costs, 6)))
    for seed in range(5):
        shuffled = random.Random(seed).sample(costs, len(costs))
        assert Counter(part_costs(shuffled, balanced_partition(shuffled, 6))) == expected


def test_equal_calls_give_equal_partitions() -> None:
    costs = [3] * 10 + [5] * 10
    assert balanced_partition(costs, 4) == balanced_partition(list(costs), 4)


def routed_batch() -> RolloutBatch:
    """Rows with records of the engine's experts."""
    return replace(rollout_batch(), record_ids=torch.arange(len(LENGTHS)) + 7)


def test_records_go_with_their_rows() -> None:
    batch, rows = routed_batch(), torch.tensor([2, 1])
    assert rollout_batch().record_ids is None
    assert batch.select(rows).record_ids.tolist() == [9, 8]
    assert joined(batch, batch.select(rows)).record_ids.tolist() == [*batch.record_ids.tolist(), 9, 8]
    with pytest.raises(ValueError, match=r"record_ids: shape \(2,\), expected \(.,\), one entry a sequence"):
        replace(batch, record_ids=batch.record_ids[:2])


def test_without_records_there_is_no_trace_of_them_in_files() -> None:
    assert "record_ids" not in rollout_batch().tensors() and "record_ids" in routed_batch().tensors()


def test_rows_of_before_may_have_no_records() -> None:
    """A run that is resumed with another `replay_routing` has groups of before."""
    both = joined(rollout_batch(), routed_batch())
    assert both.record_ids.tolist() == [-1] * len(LENGTHS) + routed_batch().record_ids.tolist()
