"""How the rows of a batch are dealt out to optimizer steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.config.losses import Update
from hybridflow.parallel.seeds import request_seed


def mini_batch_rows(
    prompt_indices: Tensor, update: Update, *, seed: int, iteration: int, epoch: int, varies: bool
) -> Sequence[Tensor]:
    """Rows of each mini-batch, int64, in an order that the seed gives.

    varies: iterations have unlike numbers of rows. Then mini-batches are nearly equal, and of at most the size.
    """
    generator = torch.Generator().manual_seed(request_seed(seed, iteration, epoch))
    order = shuffled(prompt_indices, generator, whole_prompts=update.whole_prompts)
    cut: Sequence[Tensor] = order.split(update.mini_batch_size or max(len(order), 1))
    return order.tensor_split(max(len(cut), 1)) if varies else cut


def epochs_of_mini_batches(
    prompt_indices: Tensor, iteration: int, *, update: Update, seed: int, varies: bool
) -> list[Sequence[Tensor]]:
    """`mini_batch_rows` of every epoch."""
    epochs = range(update.epochs)
    return [
        mini_batch_rows(prompt_indices, update, seed=seed, iteration=iteration, epoch=epoch, varies=varies)
        for epoch in epochs
    ]


def shuffled(prompt_indices: Tensor, generator: torch.Generator, *, whole_prompts: bool) -> Tensor:
    """Rows in random order, (N,) int64; with `whole_prompts` prompts are, the rows of each in the order they had."""
    if not whole_prompts:
        return torch.randperm(len(prompt_indices), generator=generator)
    prompts, index = prompt_indices.unique(return_inverse=True)
    place = torch.randperm(len(prompts), generator=generator)
    return place[index].argsort(stable=True)
