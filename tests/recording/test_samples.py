"""Which responses a person is shown: of many prompts, drawn by a seed, with the user's columns."""

from dataclasses import replace

import torch

from hybridflow.batch import PromptBatch
from hybridflow.recording.samples import MOST_CHARACTERS, chosen_rows, samples_of
from tests.recording.batches import rollout

INDICES = torch.arange(4).repeat_interleave(8)  # eight responses to each of four prompts


def test_rows_are_of_as_many_prompts_as_there_are() -> None:
    for seed in "abcdef":
        rows = chosen_rows(INDICES, 4, 4, seed=seed)
        assert rows == sorted(rows) and sorted(INDICES[rows].tolist()) == [0, 1, 2, 3]
        more = chosen_rows(INDICES, 4, 6, seed=seed)
        assert len(set(more)) == 6 and {INDICES[row].item() for row in more} == {0, 1, 2, 3}


def test_whole_groups_are_of_prompts_that_are_chosen_anyway() -> None:
    for seed in map(str, range(5)):
        alone, both = chosen_rows(INDICES, 4, 1, seed=seed), chosen_rows(INDICES, 4, 1, seed=seed, groups=1)
        prompt = int(INDICES[alone[0]])
        assert both == (INDICES == prompt).nonzero().flatten().tolist()
        assert len(chosen_rows(INDICES, 4, 0, seed=seed, groups=9)) == int((INDICES < 4).sum())


def test_the_seed_decides() -> None:
    assert chosen_rows(INDICES, 4, 4, seed="0/1") == chosen_rows(INDICES, 4, 4, seed="0/1")
    assert len({tuple(chosen_rows(INDICES, 4, 4, seed=f"0/{i}")) for i in range(20)}) > 10


def test_fewer_rows_and_prompts_that_are_not_known() -> None:
    assert chosen_rows(torch.tensor([0, 0, 1]), 2, 9, seed="s") == [0, 1, 2]
    assert chosen_rows(INDICES, 1, 99, seed="s") == list(range(8))
    assert chosen_rows(INDICES, 0, 4, seed="s") == []


def test_a_sample_has_the_columns_of_its_prompt() -> None:
    prompts = PromptBatch(
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int64),
        ("1+1=", "2+2="),
        {"answer": ("2", "4"), "tests": ("x" * 9999, ["y"])},
    )
    batch = replace(rollout([0, 1, 1]), truncated=torch.tensor([True, True, False]))
    found = samples_of(
        batch,
        prompts,
        [0, 2],
        lambda ids: f"{len(ids)} tokens",
        kind="heldout",
        scores=torch.tensor([0.0, 0.5, 1.0]),
        parts={"exact": torch.tensor([3.0, 4.0, 5.0])},
    )
    assert [(one["kind"], one["prompt"], one["score"], one["parts"]) for one in found] == [
        ("heldout", "1+1=", 0.0, {"exact": 3.0}),
        ("heldout", "2+2=", 1.0, {"exact": 5.0}),
    ]
    assert [one["columns"]["answer"] for one in found] == ["2", "4"]
    assert [one.get("truncated") for one in found] == [True, None]
    assert found[1]["columns"]["tests"] == ["y"] and len(found[0]["columns"]["tests"]) == MOST_CHARACTERS + 3
