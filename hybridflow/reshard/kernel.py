"""Row blocks of a weight permuted in place, and rectangles copied in one launch. Bit for bit.

permute_blocks: block i becomes the former block order[i]. On CUDA one Triton kernel: a program owns one fibre (a row
within the block, a tile of columns), loads that fibre of every block and stores it permuted. No two programs touch
the same element, so nothing is followed and nothing allocated. On a CPU the cycles of the permutation are followed, a
stretch of the blocks at a time, with that stretch as scratch; blocks that stay are not touched.

copy_pieces: many small strided copies. On CUDA one Triton kernel for all of them, that reads addresses and strides from
a table: a program owns one tile of one copy.

Elements move as integers of their width, so any dtype arrives, NaN payloads included.
"""

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not needed on a CPU
    triton = None

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
COLUMN_TILE = 128
SCRATCH_BYTES = 1 << 18  # stays in a core's cache
COPY_ROWS, COPY_COLUMNS = 8, 256  # a tile of a copy
COPY_BYTES = 8  # the widest element that copies move
COPY_FIELDS = 7  # of a row of the table, see `copy_table`

Copy = tuple[Tensor, Tensor]  # destination, source


# ------------------------------------------------------------------------------------------------------ permute


def permute_blocks(x: Tensor, order: tuple[int, ...]) -> int:
    """Permute `x` in place; the bytes of scratch it took: on a CPU one block, SCRATCH_BYTES at most.

    x: (len(order) x block_rows, columns) or (len(order) x block_rows,), contiguous, of 1, 2 or 4 byte elements.
    Errors: ValueError for any other.
    """
    blocks = as_blocks(x, len(order))
    if x.is_cuda:
        permute_triton(blocks, order)
        return 0
    return permute_cycles(blocks, order)


def as_blocks(x: Tensor, num_blocks: int) -> Tensor:
    """(num_blocks, block_rows, columns) integer view of a weight or bias."""
    if x.element_size() not in INTEGERS:
        raise ValueError(f"dtype {x.dtype} has {x.element_size()} bytes; 1, 2 and 4 are supported")
    if not x.is_contiguous() or x.shape[0] % num_blocks:
        raise ValueError(f"shape {tuple(x.shape)}, strides {x.stride()} is no contiguous stack of {num_blocks} blocks")
    return x.detach().view(INTEGERS[x.element_size()]).view(num_blocks, x.shape[0] // num_blocks, -1)


def permute_cycles(blocks: Tensor, order: tuple[int, ...]) -> int:
    """Follow the cycles of `order`, as long a stretch of each block at a time as scratch holds. Bytes of scratch."""
    stretches = blocks.flatten(1).split(SCRATCH_BYTES // blocks.element_size(), dim=1)
    scratch = torch.empty_like(stretches[0][0])
    for stretch in stretches:
        parts = [*stretch.unbind(), scratch[: stretch.shape[1]]]
        for destination, source in _moves(order):
            parts[destination].copy_(parts[source])
    return scratch.nbytes


@lru_cache(maxsize=1 << 10)  # layers are alike
def _moves(order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(to, from) in turn; len(order) is the scratch. Of each cycle one block is set aside, the others move once."""
    found, scratch = [], len(order)
    pending = {i for i, source in enumerate(order) if source != i}
    while pending:
        start = i = min(pending)
        found.append((scratch, start))
        while order[i] != start:
            found.append((i, order[i]))
            pending.remove(i)
            i = order[i]
        found.append((i, scratch))
        pending.remove(i)
    return tuple(found)


def permute_triton(blocks: Tensor, order: tuple[int, ...]) -> None:
    """The same by the Triton kernel (on CUDA, or on a CPU in Triton's interpreter)."""
    num_blocks, block_rows, columns = blocks.shape
    sources = torch.tensor(order, dtype=torch.int32, device=blocks.device)
    grid = (block_rows, triton.cdiv(columns, COLUMN_TILE))
    permute_kernel[grid](
        blocks,
        sources,
        num_blocks,
        block_rows,
        columns,
        PADDED_BLOCKS=triton.next_power_of_2(num_blocks),
        TILE=COLUMN_TILE,
    )


# --------------------------------------------------------------------------------------------------------- copy


def copy_pieces(copies: list[Copy]) -> None:
    """destination <- source for each pair, in no particular order; no destination may overlap anything else.

    copies: views of equal shape and dtype, (rows, columns) with any row stride and column stride 1, or (columns,);
    all on one device. Errors: ValueError for any other.
    """
    copies = [(_as_matrix(destination), _as_matrix(source)) for destination, source in copies]
    for destination, source in copies:
        _check_copy(destination, source)
    copies = [(destination, source) for destination, source in copies if destination.numel()]
    if copies and copies[0][0].is_cuda:
        copy_triton(copies)
        return
    for destination, source in copies:
        destination.copy_(source)


def _as_matrix(x: Tensor) -> Tensor:
    """A vector as one row."""
    x = x.detach()
    return x.unsqueeze(0) if x.dim() == 1 else x


def _check_copy(destination: Tensor, source: Tensor) -> None:
    a, b = destination, source
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device) or a.dim() != 2:
        raise ValueError(
            f"cannot copy {tuple(b.shape)} {b.dtype} on {b.device} to {tuple(a.shape)} {a.dtype} on {a.device}: "
            "a copy is between vectors or matrices alike"
        )
    for x in (a, b):
        if x.shape[1] > 1 and x.stride(1) != 1:
            raise ValueError(f"shape {tuple(x.shape)}, strides {x.stride()}: the elements of a row must be neighbours")


def copy_triton(copies: list[Copy]) -> None:
    """The copies of matrices by one launch of the Triton kernel (on CUDA, or on a CPU in Triton's interpreter)."""
    device = copies[0][0].device
    table, element_bytes = copy_table(copies)
    # program -> copy: a copy has as many programs as tiles
    owners = torch.repeat_interleave(torch.arange(len(copies), dtype=torch.int32), table[:, 6])
    table[:, 6] = table[:, 6].cumsum(0) - table[:, 6]
    elements = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
    copy_kernel[(len(owners),)](
        table.to(device),
        owners.to(device),
        ELEMENT=elements[element_bytes],
        FIELDS=COPY_FIELDS,
        ROWS=COPY_ROWS,
        COLUMNS=COPY_COLUMNS,
    )


def copy_table(copies: list[Copy]) -> tuple[Tensor, int]:
    """(table, bytes of an element): the widest elements, 8 bytes at most, that all addresses and rows are made of.

    table: (copies, COPY_FIELDS) int64 on the CPU: destination and source address in bytes, rows, columns, destination
    and source row stride in elements, number of tiles.
    """
    rows = []
    for destination, source in copies:
        size = destination.element_size()
        # the stride of a single row is never used, and need be no multiple of anything
        strides = [x.stride(0) * size if x.shape[0] > 1 else 0 for x in (destination, source)]
        height, width = destination.shape
        rows.append([destination.data_ptr(), source.data_ptr(), height, width * size, *strides, 0])
    table = torch.tensor(rows, dtype=torch.int64)
    element_bytes = gcd(COPY_BYTES, *(number for row in rows for number in (row[0], row[1], *row[3:6])))
    table[:, 3:6] //= element_bytes
    table[:, 6] = -(-table[:, 2] // COPY_ROWS) * -(-table[:, 3] // COPY_COLUMNS)
    return table, element_bytes


# ------------------------------------------------------------------------------------------------------ kernels

if triton is not None:

    @triton.jit
    def permute_kernel(data, sources, num_blocks, block_rows, columns, PADDED_BLOCKS: tl.constexpr, TILE: tl.constexpr):
        row = tl.program_id(0)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        block = tl.arange(0, PADDED_BLOCKS)
        source = tl.load(sources + block, mask=block < num_blocks, other=0)
        mask = (block < num_blocks)[:, None] & (column < columns)[None, :]
        from_row = (source * block_rows + row).to(tl.int64) * columns
        to_row = (block * block_rows + row).to(tl.int64) * columns
        fibre = tl.load(data + from_row[:, None] + column[None, :], mask=mask)
        # without this a thread could store over what another has yet to load: the PTX has no barrier of its own
        tl.debug_barrier()
        tl.store(data + to_row[:, None] + column[None, :], fibre, mask=mask)

    @triton.jit
    def copy_kernel(
        table, owners, ELEMENT: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
    ):
        program = tl.program_id(0)
        copy = table + tl.load(owners + program).to(tl.int64) * FIELDS
        destination = tl.load(copy).to(tl.pointer_type(ELEMENT))
        source = tl.load(copy + 1).to(tl.pointer_type(ELEMENT))
        rows, columns = tl.load(copy + 2), tl.load(copy + 3)
        destination_stride, source_stride = tl.load(copy + 4), tl.load(copy + 5)
        tile = program - tl.load(copy + 6)
        tiles_across = tl.cdiv(columns, COLUMNS)
        row = (tile // tiles_across * ROWS + tl.arange(0, ROWS))[:, None]
        column = (tile % tiles_across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        mask = (row < rows) & (column < columns)
        values = tl.load(source + row * source_stride + column, mask=mask)
        tl.store(destination + row * destination_stride + column, values, mask=mask)
