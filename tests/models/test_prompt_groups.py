"""Which rows share a prompt, by hand; how groups are split over replicas and cut into micro-batches."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from hybridflow.batch import RolloutBatch, balanced_partition, response_mask
from hybridflow.config.losses import Update
from hybridflow.flows.mini_batches import epochs_of_mini_batches
from hybridflow.models.prompt_groups import (
    PromptGroup,
    micro_batch_groups,
    prompt_groups,
    replica_rows,
    rows_of_rank,
    rows_that_stay,
)


def batch_of(rows: list[tuple[int, list[int], int]]) -> RolloutBatch:
    """Of (prompt index, prompt, length of the response) each; response tokens count from 100."""
    count = itertools.count(100)
    tokens = [[*prompt, *(next(count) for _ in range(response))] for _, prompt, response in rows]
    lengths, prompts = torch.tensor([len(x) for x in tokens]), torch.tensor([len(prompt) for _, prompt, _ in rows])
    return RolloutBatch(
        input_ids=torch.tensor([*itertools.chain(*tokens)]),
        lengths=lengths,
        prompt_lengths=prompts,
        prompt_indices=torch.tensor([index for index, _, _ in rows]),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        response_mask=response_mask(lengths, prompts),
        rollout_log_probs=torch.zeros(int(lengths.sum())),
    )


A, B = [1, 2, 3, 4, 5], [6, 7, 8]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # all but the last token of a prompt are shared, whatever rows stand between
        ([(0, A, 2), (1, B, 4), (0, A, 3), (1, B, 1)], [((0, 2), 4), ((1, 3), 2)]),
        # one sample each, though two prompts are alike: nothing is shared
        ([(0, A, 2), (1, A, 3)], [((0,), 0), ((1,), 0)]),
        # one index but other tokens, as after a tool has written to a prompt
        ([(0, A, 2), (0, [1, 2, 3, 4, 9], 2), (0, A, 4)], [((0, 2), 4), ((1,), 0)]),
        # a prompt of one token has nothing before its last
        ([(0, [1], 2), (0, [1], 2)], [((0,), 0), ((1,), 0)]),
        # without a response there is nothing to predict
        ([(0, A, 0), (0, A, 2), (0, A, 2)], [((0,), 0), ((1, 2), 4)]),
        # of 24 tokens 2 are saved, of 16 they would be enough
        ([(0, B, 9), (0, B, 9)], [((0,), 0), ((1,), 0)]),
        ([(0, B, 5), (0, B, 5)], [((0, 1), 2)]),
        ([], []),
    ],
)
def test_groups_by_hand(rows: list, expected: list) -> None:
    found = prompt_groups(batch_of(rows), range(len(rows))) if rows else prompt_groups(batch_of([(0, A, 1)]), [])
    assert [(group.rows, group.shared) for group in found] == expected


def test_groups_of_some_rows_only() -> None:
    batch = batch_of([(0, A, 2)] * 4 + [(1, B, 2)] * 2)
    assert prompt_groups(batch, [0, 2, 4]) == [PromptGroup((0, 2), 4), PromptGroup((4,))]


def test_tokens_of_a_group() -> None:
    lengths = [9, 7, 100, 5]
    assert PromptGroup((0, 1, 3), 4).tokens(lengths) == 4 + 5 + 3 + 1
    assert PromptGroup((2,)).tokens(lengths) == 100


# ------------------------------------------------------------------------------------------------ replicas


@pytest.mark.parametrize(
    ("rows", "num_replicas", "expected"),
    [
        ([(0, A, 3)] * 4, 1, [[0, 1, 2, 3]]),
        # two prompts, two replicas: each a whole group of 4 + 2 x 4 tokens, in whatever order rows stand
        ([(0, A, 3), (1, A, 3), (0, A, 3), (1, A, 3)], 2, [[0, 2], [1, 3]]),
        # one prompt: 4 + 4 x 4 = 20 tokens on one replica, or 12 on both
        ([(0, A, 3)] * 4, 2, [[0, 1], [2, 3]]),
        # responses of one token: 4 + 2 = 6 tokens together or 5 on both
        ([(0, A, 1)] * 2, 2, [[0], [1]]),
        # three prompts of 4 + 4 x 2 = 12 tokens on two replicas: 24 and 12 whole, or the second cut in halves of 8
        ([(0, A, 1)] * 4 + [(1, A, 1)] * 4 + [(2, A, 1)] * 4, 2, [[*range(6)], [*range(6, 12)]]),
        # more replicas than rows
        ([(0, A, 1)] * 2, 3, [[0], [1], []]),
    ],
)
def test_replicas_by_hand(rows: list, num_replicas: int, expected: list) -> None:
    assert replica_rows(batch_of(rows), num_replicas) == expected


def tokens_run(batch: RolloutBatch, rows: list[int]) -> int:
    return sum(group.tokens(batch.lengths.tolist()) for group in prompt_groups(batch, rows))


def random_rows(seed: int, samples: int) -> list[tuple[int, list[int], int]]:
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 9) for _ in range(draw.randint(1, 40))] for _ in range(12)]
    rows = [(index, prompt, draw.randint(1, 40)) for index, prompt in enumerate(prompts) for _ in range(samples)]
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_one_sample_a_prompt_is_balanced_as_rows(num_replicas: int) -> None:
    batch = batch_of(random_rows(num_replicas, 1))
    assert replica_rows(batch, num_replicas) == balanced_partition(batch.lengths.tolist(), num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 3, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_replicas_hold_every_row_once_and_run_alike(seed: int, num_replicas: int) -> None:
    batch = batch_of(random_rows(seed, 6))
    found = replica_rows(batch, num_replicas)
    assert sorted(itertools.chain(*found)) == list(range(len(batch)))
    assert all(part == sorted(part) for part in found)
    loads = [tokens_run(batch, part) for part in found]
    # the busiest has less to run than where rows are dealt out one by one, and not much more than the mean
    by_rows = balanced_partition(batch.lengths.tolist(), num_replicas)
    assert max(loads) < max(tokens_run(batch, part) for part in by_rows)
    assert max(loads) <= sum(loads) / num_replicas + max(batch.lengths)


def epochs_of(batch: RolloutBatch, size: int | None, epochs: int, *, whole_prompts: bool) -> list[list[torch.Tensor]]:
    update = Update(mini_batch_size=size, epochs=epochs, whole_prompts=whole_prompts)
    found = epochs_of_mini_batches(batch.prompt_indices, 1, update=update, seed=4, varies=False)
    return [list(mini_batches) for mini_batches in found]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_rows_of_one_mini_batch_are_those_of_the_batch(num_replicas: int) -> None:
    batch = batch_of(random_rows(2, 6))
    epochs = epochs_of(batch, None, 3, whole_prompts=False)
    for known in (epochs, []):
        assert rows_that_stay(batch, num_replicas, known) == replica_rows(batch, num_replicas)


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("whole_prompts", [False, True])
def test_mini_batches_of_one_epoch_are_dealt_each_by_itself(num_replicas: int, whole_prompts: bool) -> None:
    batch = batch_of(random_rows(3, 6))
    [epoch] = epochs_of(batch, 24, 1, whole_prompts=whole_prompts)
    found = rows_that_stay(batch, num_replicas, [epoch])
    assert sorted(itertools.chain(*found)) == list(range(len(batch))) and len(epoch) == 3
    for rows in epoch:
        own = [[row for row in part if row in rows] for part in found]
        assert own == replica_rows(batch, num_replicas, sorted(rows.tolist()))


def test_rows_that_stay_by_hand() -> None:
    """In both epochs each replica has a row of every mini-batch, which no way of the first epoch alone sees to."""
    batch = batch_of([(row, A, 5) for row in range(4)])
    epochs = [[torch.tensor([0, 1]), torch.tensor([2, 3])], [torch.tensor([0, 2]), torch.tensor([3, 1])]]
    assert rows_that_stay(batch, 2, epochs[:1]) == [[0, 2], [1, 3]]
    assert rows_that_stay(batch, 2, epochs) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("whole_prompts", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_stay_leave_replicas_nearly_alike(seed: int, whole_prompts: bool, num_replicas: int) -> None:
    """In all mini-batches together: nearer to what dealing each anew reaches than the owners of the whole batch are."""
    batch = batch_of(random_rows(seed, 8))
    epochs = epochs_of(batch, 48, 3, whole_prompts=whole_prompts)
    found = rows_that_stay(batch, num_replicas, epochs)
    assert sorted(itertools.chain(*found)) == list(range(len(batch)))

    def busiest(parts_of: Callable[[list[int]], list[list[int]]]) -> int:
        mini_batches = [sorted(rows.tolist()) for epoch in epochs for rows in epoch]
        return sum(max(tokens_run(batch, part) for part in parts_of(rows)) for rows in mini_batches)

    def of(parts: list[list[int]]) -> int:
        return busiest(lambda rows: [[row for row in part if row in rows] for part in parts])

    anew = busiest(lambda rows: replica_rows(batch, num_replicas, rows))
    assert of(found) <= 1.15 * anew and of(found) < of(replica_rows(batch, num_replicas))


# ------------------------------------------------------------------------------------------------ micro-batches


def alone(lengths: list[int], rows: list[int], max_tokens: int) -> list[list[int]]:
    cut = micro_batch_groups([PromptGroup((row,)) for row in rows], lengths, max_tokens)
    return [[row for group in groups for row in group.rows] for groups in cut]


@pytest.mark.parametrize(
    ("groups", "max_tokens", "expected"),
    [
        # lengths: row i has 10 + i tokens. Rows by themselves come first, then longer prompts
        ([((0, 1), 4), ((2,), 0), ((3, 4), 8)], 100, [[((2,), 0), ((4, 3), 8), ((1, 0), 4)]]),
        # 12, 8 + 5 + 6 = 19 and 4 + 6 + 7 = 17 tokens
        ([((0, 1), 4), ((2,), 0), ((3, 4), 8)], 19, [[((2,), 0)], [((4, 3), 8)], [((1, 0), 4)]]),
        ([((0, 1), 4), ((2,), 0), ((3, 4), 8)], 36, [[((2,), 0), ((4, 3), 8)], [((1, 0), 4)]]),
        # 6 + 4 + 5 + 6 + 7 + 8 = 36 tokens: with 27 at most, 6 + 8 + 7 + 6 and 6 + 5 + 4
        ([((0, 1, 2, 3, 4), 6)], 36, [[((4, 3, 2, 1, 0), 6)]]),
        ([((0, 1, 2, 3, 4), 6)], 27, [[((4, 3, 2), 6)], [((1, 0), 6)]]),
        # a part of one row shares nothing; what is left makes room for the next group
        ([((0, 1, 2), 6)], 16, [[((2,), 0)], [((1, 0), 6)]]),
        ([((0, 1, 2), 6), ((3, 4), 2)], 45, [[((2, 1, 0), 6)], [((4, 3), 2)]]),
        ([((0, 1, 2), 6), ((3, 4), 2)], 46, [[((2, 1, 0), 6), ((4, 3), 2)]]),
    ],
)
def test_micro_batches_of_groups_by_hand(groups: list, max_tokens: int, expected: list) -> None:
    lengths = [10, 11, 12, 13, 14]
    found = micro_batch_groups([PromptGroup(*group) for group in groups], lengths, max_tokens)
    assert [[(group.rows, group.shared) for group in part] for part in found] == expected


@pytest.mark.parametrize("max_tokens", [80, 200, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_of_groups_keep_the_budget_and_hold_all_rows_once(seed: int, max_tokens: int) -> None:
    batch = batch_of(random_rows(seed, 5))
    lengths, groups = batch.lengths.tolist(), prompt_groups(batch, range(len(batch)))
    found = micro_batch_groups(groups, lengths, max_tokens)
    assert sorted(row for part in found for group in part for row in group.rows) == list(range(len(batch)))
    assert max(sum(group.tokens(lengths) for group in part) for part in found) <= max_tokens
    whole = {frozenset(group.rows) for part in found for group in part}
    assert all(frozenset(group.rows) in whole for group in groups if group.tokens(lengths) <= max_tokens)


@pytest.mark.parametrize(
    ("lengths", "rows", "max_tokens", "expected"),
    [
        ([4, 4, 4, 4], [0, 1, 2, 3], 8, [[0, 1], [2, 3]]),
        ([4, 4, 4, 4], [0, 1, 2, 3], 7, [[0], [1], [2], [3]]),
        ([1, 5, 3, 5], [0, 1, 2, 3], 10, [[1, 3], [2, 0]]),
        ([1, 5, 3, 5], [0, 2], 10, [[2, 0]]),
        ([5, 9], [1], 9, [[1]]),
        ([5], [], 5, []),
    ],
)
def test_micro_batches_of_single_rows_by_hand(
    lengths: list[int], rows: list[int], max_tokens: int, expected: list[list[int]]
) -> None:
    assert alone(lengths, rows, max_tokens) == expected


@pytest.mark.parametrize("max_tokens", [30, 64, 200, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_of_single_rows_keep_the_budget(max_tokens: int, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(60)]
    rows = draw.sample(range(60), 45)
    groups = alone(lengths, rows, max_tokens)
    assert sorted(itertools.chain(*groups)) == sorted(rows)
    assert all(groups)
    assert max(sum(lengths[row] for row in part) for part in groups) <= max_tokens
    in_order = [lengths[row] for group in groups for row in group]
    assert in_order == sorted(in_order, reverse=True)  # so rows of one length stand side by side
    # the fewest runs of that order: no group could have taken the next one's first row
    for group, following in itertools.pairwise(groups):
        assert sum(lengths[row] for row in group) + lengths[following[0]] > max_tokens


def test_micro_batches_do_not_depend_on_the_order_of_the_rows() -> None:
    lengths = [3, 1, 3, 2, 3, 1]
    expected = alone(lengths, [0, 1, 2, 3, 4, 5], 6)
    for rows in itertools.permutations(range(6)):
        assert alone(lengths, list(rows), 6) == expected


def test_a_row_beyond_the_budget_fails_with_its_length() -> None:
    with pytest.raises(AssertionError, match="row 1 has 9 tokens, the budget is 8"):
        alone([5, 9], [0, 1], 8)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_some_rows_alone_are_dealt_out_as_a_batch_of_them_is(num_replicas: int) -> None:
    """Also where the longest row is none of them."""
    rows = [*((0, A * 3, size) for size in (1, 3, 2, 90, 4)), (1, B, 5), (2, A, 40), (1, B, 3)]
    batch = batch_of(rows)
    some = torch.tensor([0, 1, 2, 4, 5, 7])
    expected = [some[own].tolist() for own in replica_rows(batch.select(some), num_replicas)]
    assert replica_rows(batch, num_replicas, some.tolist()) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_tokens_share_long_rows_and_deal_short_ones(size: int) -> None:
    """Of a part of the rows: what no rank's part of the budget holds is of all ranks, each other row of one."""
    lengths = [9, 100, 40, 25, 7, 26, 50, 3]
    batch, rows = batch_of([(index, [1, 2], length - 2) for index, length in enumerate(lengths)]), [7, 0, 1, 2, 3, 5, 6]
    found = [rows_of_rank(batch, rows, size=size, rank=rank, budget=100) for rank in range(size)]
    limit = 100 // size
    assert all(shared == [row for row in sorted(rows) if lengths[row] > limit] for _, shared in found)
    assert sorted(row for whole, _ in found for row in whole) == [row for row in sorted(rows) if lengths[row] <= limit]
    assert rows_of_rank(batch, [1], size=size, rank=0, budget=100) == ([], [1])
