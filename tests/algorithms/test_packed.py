"""Literal values, and rows without a token wherever they stand."""

import pytest
import torch

from hybridflow.algorithms.packed import count_masked, last_masked, scatter_masked, select_masked, spread

LENGTHS = torch.tensor([0, 2, 0, 0, 3, 1, 0])
MASK = torch.tensor([True, True, False, True, False, False])


def test_every_token_has_what_its_sequence_has() -> None:
    assert spread(torch.arange(7), LENGTHS).tolist() == [1, 1, 4, 4, 4, 5]
    assert spread(torch.tensor([True, False]), torch.tensor([1, 2])).tolist() == [True, False, False]


def test_tokens_in_the_mask_are_counted() -> None:
    assert count_masked(MASK, LENGTHS).tolist() == [0, 2, 0, 0, 1, 0, 0]
    assert count_masked(MASK[:0], torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]
    assert count_masked(MASK[:0], LENGTHS[:0]).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (40,), generator=generator)
    mask = torch.rand(int(lengths.sum()), generator=generator) > 0.5
    assert count_masked(mask, lengths).tolist() == [int(part.sum()) for part in mask.split(lengths.tolist())]


def test_values_that_the_mask_selects_come_and_go_back() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert select_masked(values, MASK).tolist() == [1.0, 2.0, 4.0]
    assert scatter_masked(select_masked(values, MASK), MASK).tolist() == [1.0, 2.0, 0.0, 4.0, 0.0, 0.0]
    assert select_masked(values, MASK).data_ptr() != values.data_ptr(), "nothing that is done to it changes the values"


def test_the_last_token_that_the_mask_selects() -> None:
    assert last_masked(MASK, count_masked(MASK, LENGTHS)).tolist() == [1, 3]
