"""The order in which rows are trained on."""

import torch

from hybridflow.flows.mini_batches import shuffled

PROMPTS = torch.tensor([5, 5, 5, 2, 2, 2, 9, 9, 9, 7, 7, 7])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_rows_are_shuffled_one_by_one() -> None:
    order = shuffled(PROMPTS, generator(), whole_prompts=False)
    assert order.tolist() == torch.randperm(12, generator=generator()).tolist()


def test_prompts_are_shuffled_with_all_their_rows() -> None:
    order = shuffled(PROMPTS, generator(), whole_prompts=True)
    place = torch.randperm(4, generator=generator()).tolist()  # of prompts 2, 5, 7, 9
    expected = [prompt for _, prompt in sorted(zip(place, [2, 5, 7, 9], strict=True))]
    assert PROMPTS[order].tolist() == [prompt for prompt in expected for _ in range(3)]
    assert [int(first) % 3 for first in order] == [0, 1, 2] * 4, "within a prompt as they were"
    assert expected != [2, 5, 7, 9] and expected != [5, 2, 9, 7]


def test_rows_of_a_prompt_that_lie_apart_come_together() -> None:
    order = shuffled(torch.tensor([1, 0, 1, 0]), generator(), whole_prompts=True)
    assert sorted(order[:2].tolist()) in ([0, 2], [1, 3]) and sorted(order.tolist()) == [0, 1, 2, 3]
