"""Rows of fixed data as packed batches, token by token."""

import torch

from hybridflow.data.example_batches import given_batch, labelled_batch, mismatched, pair_batch
from hybridflow.data.examples import Example
from hybridflow.models.prompt_groups import prompt_groups


def example(prompt: list[int], *completions: list[int], label: bool = True, margin: float = 0.0) -> Example:
    sequences = tuple(torch.tensor([*prompt, *completion]) for completion in completions)
    trained = tuple(torch.arange(len(ids)) >= len(prompt) for ids in sequences)
    return Example(sequences, trained, (len(prompt),) * len(sequences), label=label, margin=margin)


def test_a_pair_is_two_rows_that_answer_one_prompt() -> None:
    batch = pair_batch([example([5, 6], [7], [8, 9], margin=0.5), example([4], [3], [2])])
    assert batch.input_ids.tolist() == [5, 6, 7, 5, 6, 8, 9, 4, 3, 4, 2]
    assert batch.lengths.tolist() == [3, 4, 2, 2]
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert batch.prompt_indices.tolist() == [0, 0, 1, 1]
    assert batch.response_mask.int().tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.margins.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_what_a_pair_shares_of_its_prompt_is_run_once() -> None:
    batch = pair_batch([example([5, 6, 7, 8], [1], [2])])
    [group] = prompt_groups(batch, [0, 1])
    assert (group.rows, group.shared) == ((0, 1), 3)


def test_the_first_token_of_a_sequence_never_counts() -> None:
    """As of a text without a prompt: nothing predicts it, and a mean must not divide by it."""
    batch = given_batch([example([], [5, 6, 7])])
    assert batch.response_mask.tolist() == [False, True, True]
    assert batch.prompt_lengths.tolist() == [1]


def test_gaps_stay_gaps() -> None:
    """What a user said in between is no token that counts."""
    mask = torch.tensor([False, True, False, True])
    batch = given_batch([Example((torch.tensor([4, 5, 6, 7]),), (mask,), (1,))])
    assert batch.response_mask.tolist() == mask.tolist()
    assert mask.tolist() == [False, True, False, True]  # as it was


def test_labels() -> None:
    batch = labelled_batch([example([5], [6]), example([5], [7], label=False)])
    assert batch.desirable.tolist() == [True, False]


def test_mismatched_rows_have_the_completion_of_the_next() -> None:
    rows = [example([1, 2], [3]), example([4], [5, 6]), example([7, 8, 9], [10, 11])]
    found = mismatched(rows, max_length=9)
    assert [one.sequences[0].tolist() for one in found] == [[1, 2, 5, 6], [4, 10, 11], [7, 8, 9, 3]]
    assert [one.trained[0].int().tolist() for one in found] == [[0, 0, 1, 1], [0, 1, 1], [0, 0, 0, 1]]
    assert [one.prompt_lengths for one in found] == [(2,), (1,), (3,)]


def test_a_mismatched_row_is_cut_at_the_limit() -> None:
    rows = [example([1, 2, 3], [4]), example([5], [6, 7, 8])]
    assert [one.sequences[0].tolist() for one in mismatched(rows, max_length=4)] == [[1, 2, 3, 6], [5, 4]]
