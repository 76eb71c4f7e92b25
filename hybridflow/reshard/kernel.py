"""Permute the head blocks of a weight or bias in place: engine block i becomes trainer block order[i].

On CUDA one Triton kernel: a program owns one fibre (a row within the head, a tile of columns), loads that fibre of
every head and stores it permuted. No two programs touch the same element, so nothing is followed and nothing
allocated. On a CPU the cycles of the permutation are followed with one head block as scratch; blocks that stay are
not touched.

Elements move as integers of their width: any dtype of 1, 2 or 4 bytes, NaN payloads included, arrives bit for bit.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not needed on a CPU
    triton = None

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
COLUMN_TILE = 128


def permute_heads(x: Tensor, order: tuple[int, ...]) -> int:
    """Permute `x` in place; the bytes of scratch it took.

    x: (len(order) x head_dim, columns) or (len(order) x head_dim,), contiguous.
    """
    blocks = as_blocks(x, len(order))
    if x.is_cuda:
        permute_triton(blocks, order)
        return 0
    return permute_cycles(blocks, order)


def as_blocks(x: Tensor, num_blocks: int) -> Tensor:
    """(num_blocks, head_dim, columns) integer view of a weight or bias."""
    if x.element_size() not in INTEGERS:
        raise ValueError(f"dtype {x.dtype} has {x.element_size()} bytes; 1, 2 and 4 are supported")
    if not x.is_contiguous() or x.shape[0] % num_blocks:
        raise ValueError(f"shape {tuple(x.shape)}, strides {x.stride()} is no contiguous stack of {num_blocks} blocks")
    return x.detach().view(INTEGERS[x.element_size()]).view(num_blocks, x.shape[0] // num_blocks, -1)


def permute_cycles(blocks: Tensor, order: tuple[int, ...]) -> int:
    """Follow each cycle of `order`: one block is set aside, the others move once. Bytes of scratch."""
    scratch = torch.empty_like(blocks[0])
    pending = {i for i, source in enumerate(order) if source != i}
    while pending:
        start = i = min(pending)
        scratch.copy_(blocks[start])
        while order[i] != start:
            blocks[i].copy_(blocks[order[i]])
            pending.remove(i)
            i = order[i]
        blocks[i].copy_(scratch)
        pending.remove(i)
    return scratch.nbytes


def permute_triton(blocks: Tensor, order: tuple[int, ...]) -> None:
    """The same by the Triton kernel (on CUDA, or on a CPU in Triton's interpreter)."""
    num_blocks, head_dim, columns = blocks.shape
    sources = torch.tensor(order, dtype=torch.int32, device=blocks.device)
    grid = (head_dim, triton.cdiv(columns, COLUMN_TILE))
    permute_kernel[grid](
        blocks,
        sources,
        num_blocks,
        head_dim,
        columns,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        TILE=COLUMN_TILE,
    )


if triton is not None:

    @triton.jit
    def permute_kernel(data, sources, num_blocks, head_dim, columns, PADDED_BLOCKS: tl.constexpr, TILE: tl.constexpr):
        row = tl.program_id(0)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        block = tl.arange(0, PADDED_BLOCKS)
        source = tl.load(sources + block, mask=block < num_blocks, other=0)
        mask = (block < num_blocks)[:, None] & (column < columns)[None, :]
        from_row = (source * head_dim + row).to(tl.int64) * columns
        to_row = (block * head_dim + row).to(tl.int64) * columns
        fibre = tl.load(data + from_row[:, None] + column[None, :], mask=mask)
        # without this a thread could store over what another has yet to load: the PTX has no barrier of its own
        tl.debug_barrier()
        tl.store(data + to_row[:, None] + column[None, :], fibre, mask=mask)
