"""How rows are dealt out to optimizer steps: all of them once an epoch, anew in every epoch and iteration."""

import torch

from hybridflow.config.losses import Update
from hybridflow.flows.mini_batches import epochs_of_mini_batches

PROMPTS = torch.arange(6).repeat_interleave(4)


def dealt(iteration: int, **update: object) -> list[list[list[int]]]:
    """Of each epoch the rows of each mini-batch."""
    config = Update.model_validate({"mini_batch_size": 8, "epochs": 3} | update)
    found = epochs_of_mini_batches(PROMPTS, iteration, update=config, seed=5, varies=False)
    return [[rows.tolist() for rows in mini_batches] for mini_batches in found]


def test_every_epoch_has_all_rows_and_deals_them_anew() -> None:
    first, second, third = dealt(1)
    for epoch in (first, second, third):
        assert sorted(row for rows in epoch for row in rows) == list(range(24)) and [*map(len, epoch)] == [8, 8, 8]
    assert len({tuple(sorted(epoch[0])) for epoch in (first, second, third, *dealt(2))}) == 6
    assert dealt(1) == [first, second, third], "a restart deals them as before"


def test_whole_prompts_stay_together_and_go_to_other_mini_batches() -> None:
    epochs = dealt(1, whole_prompts=True)
    for epoch in epochs:
        assert all(rows[i + 1] == rows[i] + 1 for rows in epoch for i in (0, 1, 2, 4, 5, 6))
    assert len({tuple(epoch[0]) for epoch in epochs}) == 3
