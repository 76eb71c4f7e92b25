"""Steps from sequences to their tokens and back, in numpy: torch needs an index of 8 bytes a token for the same.

All tensors lie on the CPU, as those of a batch do, and share no memory with a result.
"""

import numpy as np
import torch
from torch import Tensor


def spread(per_sequence: Tensor, lengths: Tensor) -> Tensor:
    """(T,): every token has what its sequence has. per_sequence: (N,); lengths: int64 (N,)."""
    return torch.from_numpy(np.repeat(per_sequence.numpy(), lengths.numpy()))


def select_masked(values: Tensor, mask: Tensor) -> Tensor:
    """The entries of a (T,) tensor that the mask selects, in their order. mask: bool (T,)."""
    return torch.from_numpy(values.detach().numpy()[mask.numpy()])


def scatter_masked(values: Tensor, mask: Tensor) -> Tensor:
    """(T,) with these values, in their order, where the mask selects, and zeros elsewhere. mask: bool (T,)."""
    found = values.new_zeros(len(mask))
    found.numpy()[mask.numpy()] = values.numpy()
    return found


def last_masked(mask: Tensor, counts: Tensor) -> Tensor:
    """Where in (T,) the last token of each sequence is that the mask selects, of sequences that have one. int64.

    counts: int64 (N,), tokens of each sequence that the mask selects.
    """
    return torch.from_numpy(np.flatnonzero(mask.numpy()))[counts.cumsum(0)[counts > 0] - 1]


def count_masked(mask: Tensor, lengths: Tensor) -> Tensor:
    """int64 (N,): how many tokens of each sequence the mask selects. mask: bool (T,); lengths: int64 (N,)."""
    counts, there = torch.zeros_like(lengths), lengths > 0
    if len(mask):
        starts = (lengths.cumsum(0) - lengths)[there]  # of neighbours, each up to the next
        counts[there] = torch.from_numpy(np.add.reduceat(mask.numpy(), starts.numpy(), dtype=np.int64))
    return counts
