"""Blocks of weights permuted in place on a CPU: the cycles are followed, a stretch of the blocks at a time as scratch.

In C for all weights alike at once, or by torch. `reshard.execute` opens this door.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from hybridflow.architecture.permutations import Order, cycles
from hybridflow.cpu.kernels.moves import Move, move_blocks

SCRATCH_BYTES = 1 << 18  # stays in a core's cache


def permute_in_c(stacks: Sequence[Tensor], order: Order) -> int:
    """Each of stacks (blocks, ...), of one shape; the bytes of scratch: a stretch for each thread that computes."""
    return move_blocks(stacks, moves(order), SCRATCH_BYTES)


def permute_by_torch(stacks: Sequence[Tensor], order: Order) -> int:
    """The same, one after the other."""
    return max(permute_cycles(blocks, order) for blocks in stacks)


def permute_cycles(blocks: Tensor, order: Order) -> int:
    """Follow the cycles of `order`, as long a stretch of each block at a time as scratch holds. Bytes of scratch."""
    if not moves(order):
        return 0
    stretches = blocks.flatten(1).split(SCRATCH_BYTES // blocks.element_size(), dim=1)
    scratch = torch.empty_like(stretches[0][0])
    for stretch in stretches:
        parts = [*stretch.unbind(), scratch[: stretch.shape[1]]]
        for destination, source in moves(order):
            parts[destination].copy_(parts[source])
    return scratch.nbytes


@lru_cache(maxsize=1 << 10)  # layers are alike
def moves(order: Order) -> tuple[Move, ...]:
    """What is copied in turn; len(order) is the scratch. Of each cycle one block is set aside, the others move once."""
    scratch = len(order)
    chains = ((scratch, *cycle, scratch) for cycle in cycles(order))
    return tuple(move for chain in chains for move in pairwise(chain))


def copy_each(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """destination <- source for each pair."""
    for destination, source in copies:
        destination.copy_(source)
