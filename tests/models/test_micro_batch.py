"""What a forward pass reads of a batch made by hand: tokens, positions, wanted rows, and where their outputs belong."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from hybridflow.batch import RolloutBatch, Tokens, balanced_partition, offsets, response_mask
from hybridflow.cpu.megatron.products import repeated
from hybridflow.models.micro_batch import (
    MicroBatch,
    filled_up,
    padding,
    prediction_micro_batches,
    sequence_micro_batches,
)
from hybridflow.models.prompt_groups import replica_rows

CPU = torch.device("cpu")


def rollout_batch(lengths: list[int], prompt_lengths: list[int]) -> RolloutBatch:
    """Token t has id 100 + t."""
    sizes, prompts = torch.as_tensor(lengths), torch.as_tensor(prompt_lengths)
    return RolloutBatch(
        input_ids=torch.arange(100, 100 + sum(lengths)),
        lengths=sizes,
        prompt_lengths=prompts,
        prompt_indices=torch.arange(len(lengths)),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        response_mask=response_mask(sizes, prompts),
        rollout_log_probs=torch.zeros(sum(lengths)),
    )


# tokens     100 101 102 | 103 104 105 106 107 | 108 109 | 110 111 112 113
# response            x         x   x   x   x          x           x   x
BATCH = rollout_batch(lengths=[3, 5, 2, 4], prompt_lengths=[2, 1, 1, 2])


def lists(micro_batch: MicroBatch) -> dict[str, list[int]]:
    tensors = {name: getattr(micro_batch, name) for name in ("input_ids", "positions", "rows", "where", "targets")}
    return {"lengths": list(micro_batch.packed.lengths), **{name: x.tolist() for name, x in tensors.items()}}


def test_predictions_of_the_whole_batch_by_hand() -> None:
    # longest first; the last token of each sequence is not run
    (micro_batch,) = prediction_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=100, padded=padding(1), device=CPU)
    assert lists(micro_batch) == {
        "lengths": [4, 3, 2, 1],
        "input_ids": [103, 104, 105, 106, 110, 111, 112, 100, 101, 108],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 1, 0],
        "rows": [0, 1, 2, 3, 5, 6, 8, 9],
        "where": [4, 5, 6, 7, 12, 13, 2, 9],
        "targets": [104, 105, 106, 107, 112, 113, 102, 109],
    }
    assert micro_batch.packed.cu_seqlens_q.tolist() == micro_batch.packed.cu_seqlens_kv.tolist() == [0, 4, 7, 9, 10]
    assert micro_batch.packed.cu_seqlens_q.dtype == torch.int32
    assert micro_batch.packed.max_seqlen_q == micro_batch.packed.max_seqlen_kv == 4


def test_predictions_cut_by_the_token_budget() -> None:
    # the tokens that are run are 4, 3, 2, 1 of them: with a budget of 5 that is [4], [3, 2], [1]
    micro_batches = prediction_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=5, padded=padding(1), device=CPU)
    assert [lists(m)["lengths"] for m in micro_batches] == [[4], [3, 2], [1]]
    assert [lists(m)["where"] for m in micro_batches] == [[4, 5, 6, 7], [12, 13, 2], [9]]


def test_predictions_of_some_rows_only() -> None:
    (micro_batch,) = prediction_micro_batches(BATCH, [0, 3], max_tokens=100, padded=padding(1), device=CPU)
    assert lists(micro_batch) == {
        "lengths": [3, 2],
        "input_ids": [110, 111, 112, 100, 101],
        "positions": [0, 1, 2, 0, 1],
        "rows": [1, 2, 4],
        "where": [12, 13, 2],
        "targets": [112, 113, 102],
    }


def test_missing_tokens_are_one_more_sequence_that_nobody_reads() -> None:
    (plain,) = prediction_micro_batches(BATCH, [0, 3], max_tokens=100, padded=padding(1), device=CPU)
    (padded,) = prediction_micro_batches(BATCH, [0, 3], max_tokens=100, padded=padding(4), device=CPU)
    expected = lists(plain)
    for name, tail in {"lengths": [3], "input_ids": [0, 0, 0], "positions": [0, 1, 2]}.items():
        expected[name] += tail
    assert lists(padded) == expected
    assert padded.packed.cu_seqlens_q.tolist() == [0, 3, 5, 8]


def test_no_padding_where_the_tokens_divide() -> None:
    (micro_batch,) = prediction_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=100, padded=padding(5), device=CPU)
    assert micro_batch.packed.lengths == (4, 3, 2, 1)


def test_a_score_is_read_before_pad_tokens_at_the_end() -> None:
    """As transformers reads it: at the last token that is not the pad token, wherever others of them are."""
    ids = [7, 3, 8, 9, 3, 3, 3, 7, 8, 9, 3]  # rows of 6 and 5 tokens after prompts of 2
    batch = RolloutBatch(
        torch.tensor(ids),
        torch.tensor([6, 5]),
        torch.tensor([2, 2]),
        torch.arange(2),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([False, False, True, True, True, True, False, False, True, True, True]),
        torch.zeros(11),
    )
    (found,) = sequence_micro_batches(batch, [0, 1], max_tokens=99, padded=padding(1), device=CPU, pad_token_id=3)
    assert found.input_ids.tolist() == [7, 3, 8, 9, 3, 7, 8, 9]
    assert found.rows.tolist() == [3, 7] and found.where.tolist() == [0, 1]
    (whole,) = sequence_micro_batches(batch, [0, 1], max_tokens=99, padded=padding(1), device=CPU)
    assert whole.rows.tolist() == [5, 10]


def test_sequences_by_hand() -> None:
    # every token is run; the output wanted is the last one's, and belongs to the row
    micro_batches = sequence_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=9, padded=padding(4), device=CPU)
    first, second = map(lists, micro_batches)
    assert first == {
        "lengths": [5, 4, 3],
        "input_ids": [103, 104, 105, 106, 107, 110, 111, 112, 113, 0, 0, 0],
        "positions": [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
        "rows": [4, 8],
        "where": [1, 3],
        "targets": first["targets"],
    }
    assert second == {
        "lengths": [3, 2, 3],
        "input_ids": [100, 101, 102, 108, 109, 0, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 1, 2],
        "rows": [2, 4],
        "where": [0, 2],
        "targets": second["targets"],
    }


def test_no_rows_make_no_micro_batch() -> None:
    assert prediction_micro_batches(BATCH, [], max_tokens=9, padded=padding(4), device=CPU) == []
    assert sequence_micro_batches(BATCH, [], max_tokens=9, padded=padding(4), device=CPU) == []


@pytest.mark.parametrize(("group", "missing"), [(1, 0), (2, 1), (3, 0), (4, 1), (5, 2)])
def test_micro_batches_are_filled_up_with_some_that_nobody_reads(group: int, missing: int) -> None:
    micro_batches = prediction_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=5, padded=padding(1), device=CPU)
    filled = filled_up(micro_batches, group, padded=padding(4), device=CPU)
    assert filled[:3] == micro_batches and len(filled) == 3 + missing
    nothing = {"rows": [], "where": [], "targets": []}
    fillers = [lists(micro_batch) for micro_batch in filled[3:]]
    assert fillers == [{"lengths": [4], "input_ids": [0] * 4, "positions": [0, 1, 2, 3], **nothing}] * missing


def test_none_are_filled_up_with_none() -> None:
    """Every replica has a row of a mini-batch; where it has none it takes part in nothing."""
    assert filled_up([], 2, padded=padding(1), device=CPU) == []


# --------------------------------------------------------------------- a prompt that samples share

# row                0                     1                  2               3               4
# tokens     10 11 12 100 101 | 20 21 102 103 104 105 | 10 11 12 106 | 20 21 22 107 | 10 11 12 108 109 110
# response             x   x           x   x   -   x               x             x            x   x   x
PROMPTS = ([10, 11, 12], [20, 21], [10, 11, 12], [20, 21, 22], [10, 11, 12])
RESPONSES = ([100, 101], [102, 103, 104, 105], [106], [107], [108, 109, 110])


def grouped_batch() -> RolloutBatch:
    """Rows 0, 2 and 4 answer one prompt; rows 1 and 3 are of one index but other tokens."""
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    batch = rollout_batch([len(row) for row in rows], [len(prompt) for prompt in PROMPTS])
    mask = batch.response_mask.clone()
    mask[9] = False
    ids = torch.tensor([token for row in rows for token in row])
    return replace(batch, input_ids=ids, response_mask=mask, prompt_indices=torch.tensor([0, 1, 0, 1, 0]))


def test_predictions_of_samples_of_a_prompt_by_hand() -> None:
    """All but the last token of the prompt once, then what follows it, the longest first."""
    (micro_batch,) = prediction_micro_batches(
        grouped_batch(), [0, 1, 2, 3, 4], max_tokens=99, padded=padding(8), device=CPU
    )
    assert lists(micro_batch) == {
        "lengths": [5, 3, 2, 3, 2, 1],
        "input_ids": [20, 21, 102, 103, 104, 20, 21, 22, 10, 11, 12, 108, 109, 12, 100, 12],
        "positions": [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 2],
        "rows": [1, 2, 4, 7, 10, 11, 12, 13, 14, 15],
        "where": [7, 8, 10, 18, 22, 23, 24, 3, 4, 14],
        "targets": [102, 103, 105, 107, 108, 109, 110, 100, 101, 106],
    }
    shared = micro_batch.packed.shared
    assert (shared.prompts, shared.responses, shared.lengths) == (slice(8, 10), slice(10, 16), ((2, (3, 2, 1)),))


def test_a_group_beyond_the_budget_has_its_prompt_in_each_part() -> None:
    """Of 2 + 3 + 2 + 1 tokens: with 7 at most the shortest is by itself."""
    micro_batches = prediction_micro_batches(grouped_batch(), [0, 2, 4], max_tokens=7, padded=padding(1), device=CPU)
    assert [m.input_ids.tolist() for m in micro_batches] == [[10, 11, 12, 108, 109, 12, 100], [10, 11, 12]]
    assert [m.where.tolist() for m in micro_batches] == [[22, 23, 24, 3, 4], [14]]
    assert [m.packed.shared is None for m in micro_batches] == [False, True]


def test_sequences_that_share_a_prompt_by_hand() -> None:
    (micro_batch,) = sequence_micro_batches(grouped_batch(), [0, 2, 3, 4], max_tokens=99, padded=padding(1), device=CPU)
    found = lists(micro_batch)
    assert found["input_ids"] == [20, 21, 22, 107, 10, 11, 12, 108, 109, 110, 12, 100, 101, 12, 106]
    assert found["positions"] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 2, 3, 4, 2, 3]
    assert found["rows"] == [3, 9, 12, 14] and found["where"] == [3, 4, 0, 2]


@pytest.mark.parametrize("max_tokens", [40, 100])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_response_token_of_groups_is_predicted_once(dp: int, max_tokens: int) -> None:
    """Each wanted row reads the token before the one it predicts, at its position; no output is wanted twice."""
    draw = torch.Generator().manual_seed(dp)
    prompts, indices = torch.randint(2, 15, (6,), generator=draw), torch.arange(24) % 6
    batch = rollout_batch((prompts[indices] + torch.randint(1, 9, (24,), generator=draw)).tolist(), prompts[indices])
    starts = offsets(batch.lengths)
    ids = batch.input_ids.clone()
    for row, index in enumerate(indices.tolist()):
        ids[starts[row] :][: prompts[index]] = torch.arange(prompts[index]) + 20 * index
    batch = replace(batch, input_ids=ids, prompt_indices=indices)
    where, num_run = [], 0
    for rows in replica_rows(batch, dp):
        for m in prediction_micro_batches(batch, rows, max_tokens=max_tokens, padded=padding(1), device=CPU):
            assert len(m.input_ids) == sum(m.packed.lengths) <= max_tokens
            assert len(m.rows.unique()) == len(m.rows)
            assert torch.equal(m.input_ids[m.rows], ids[m.where - 1]) and torch.equal(m.targets, ids[m.where])
            row = torch.searchsorted(batch.lengths.cumsum(0), m.where, right=True)
            assert torch.equal(m.positions[m.rows], m.where - 1 - starts[row])
            where += m.where.tolist()
            num_run += len(m.input_ids)
    assert sorted(where) == batch.response_mask.nonzero()[:, 0].tolist()
    assert num_run < int((batch.lengths - 1).sum()) * 0.8


# --------------------------------------------------------------------- every output once over all replicas


def random_batch(seed: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 9, (23,), generator=generator)
    responses = torch.randint(1, 13, (23,), generator=generator)
    return rollout_batch((prompts + responses).tolist(), prompts.tolist())


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("max_tokens", [21, 64])
@pytest.mark.parametrize("dp", [1, 3])
def test_every_response_token_is_predicted_once_from_the_token_before_it(
    dp: int, max_tokens: int, multiple: int
) -> None:
    batch = random_batch(seed=dp)
    last = set((batch.lengths.cumsum(0) - 1 + 100).tolist())
    where: list[int] = []
    run: list[int] = []
    for rows in balanced_partition(batch.lengths.tolist(), dp):
        for micro_batch in prediction_micro_batches(
            batch, rows, max_tokens=max_tokens, padded=padding(multiple), device=CPU
        ):
            assert len(micro_batch.input_ids) % multiple == 0
            assert len(micro_batch.input_ids) < max_tokens + multiple
            assert sum(micro_batch.packed.lengths) == len(micro_batch.input_ids) == len(micro_batch.positions)
            # ids count the batch's tokens from 100: the one read is the predecessor of the one predicted
            assert torch.equal(micro_batch.input_ids[micro_batch.rows] + 1, micro_batch.targets)
            assert torch.equal(micro_batch.where + 100, micro_batch.targets)
            where += micro_batch.where.tolist()
            run += micro_batch.input_ids[micro_batch.input_ids > 0].tolist()
    assert sorted(where) == batch.response_mask.nonzero().squeeze(1).tolist()
    assert Counter(run) == Counter(set(batch.input_ids.tolist()) - last)


@pytest.mark.parametrize("dp", [1, 3])
def test_every_sequence_has_one_output_read_at_its_last_token(dp: int) -> None:
    batch = random_batch(seed=7)
    ends = batch.lengths.cumsum(0) - 1
    where: list[int] = []
    for rows in balanced_partition(batch.lengths.tolist(), dp):
        for micro_batch in sequence_micro_batches(batch, rows, max_tokens=50, padded=padding(4), device=CPU):
            assert torch.equal(micro_batch.input_ids[micro_batch.rows], ends[micro_batch.where] + 100)
            assert torch.equal(micro_batch.positions[micro_batch.rows], batch.lengths[micro_batch.where] - 1)
            where += micro_batch.where.tolist()
    assert sorted(where) == list(range(len(batch)))


@pytest.mark.parametrize("max_tokens", [8, 17, 60])
def test_a_sequence_lies_in_one_micro_batch_whole(max_tokens: int) -> None:
    """With all of its response tokens, gaps and tails or not: a loss of a whole response needs no other micro-batch."""
    generator = torch.Generator().manual_seed(max_tokens)
    lengths = torch.randint(2, 9, (40,), generator=generator)
    batch = rollout_batch(lengths.tolist(), [1] * 40)
    mask = batch.response_mask & (torch.rand(len(batch.input_ids), generator=generator) < 0.6)
    batch = replace(batch, response_mask=mask)
    micro_batches = prediction_micro_batches(
        batch, list(range(40)), max_tokens=max_tokens, padded=padding(1), device=CPU
    )
    found = [Tokens(batch, m.where, CPU).sequences.unique().tolist() for m in micro_batches]
    rows = [row for part in found for row in part]
    assert len(rows) == len(set(rows)) and set(rows) == set(Tokens(batch, mask.nonzero()[:, 0], CPU).sequences.tolist())


@pytest.mark.parametrize("multiple", [1, 4])
def test_few_numbers_of_tokens_come_where_products_compile_a_kernel_for_each(multiple: int) -> None:
    numbers = [padding(multiple, repeated)(tokens) for tokens in range(1, 8193)]
    for tokens, padded in enumerate(numbers, 1):
        assert tokens <= padded <= (tokens + multiple) * 33 / 32 and padded % multiple == 0
    assert len({padded for padded in numbers if 2048 < padded <= 4096}) == 32
    (plain,) = prediction_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=100, padded=padding(1), device=CPU)
    (few,) = prediction_micro_batches(BATCH, [0, 1, 2, 3], max_tokens=100, padded=lambda tokens: tokens + 3, device=CPU)
    assert few.packed.lengths == (*plain.packed.lengths, 3)
    assert few.input_ids[:-3].tolist() == plain.input_ids.tolist() and torch.equal(few.rows, plain.rows)
