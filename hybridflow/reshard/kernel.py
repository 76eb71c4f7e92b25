"""Row blocks of a weight permuted in place, and rectangles copied in one launch. Bit for bit.

permute_blocks: block i becomes the former block order[i]; blocks that stay are not touched. On CUDA one Triton kernel
without scratch: a program owns one fibre (the same few elements of every block), loads it of up to LANES blocks and
stores it permuted. No two programs touch the same element. More blocks than that are permuted in rounds of LANES, each
a separate permutation (see `rounds`): what a program holds in registers does not grow with the blocks.

copy_pieces: many small strided copies. On CUDA one Triton kernel for all of them, that reads addresses and strides from
a table: a program owns one tile of one copy.

Both by a `Mover`, that of the device. Elements move as integers of their width, so any dtype arrives, NaN payloads
included.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybridflow.architecture.permutations import Order, cycles

try:
    import triton
    import triton.language as tl
except ImportError:  # not needed on a CPU
    triton = None

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
LANES = 64  # blocks a round
PROGRAM_BYTES, WARPS = 1 << 13, 8  # of a round in a program's registers: 32 a thread
COPY_ROWS, COPY_COLUMNS = 8, 256  # a tile of a copy
COPY_BYTES = 8  # the widest element that copies move
COPY_FIELDS = 7  # of a row of the table, see `copy_table`

Copy = tuple[Tensor, Tensor]  # destination, source
Move = tuple[int, int]  # to block, from block


class Mover(NamedTuple):
    """permute: each of (blocks, ...) integers, of one shape, in an order; the bytes of scratch it took.

    copy: destination <- source for each pair of matrices alike.
    """

    permute: Callable[[Sequence[Tensor], Order], int]
    copy: Callable[[Sequence[Copy]], None]


# ------------------------------------------------------------------------------------------------------ permute


def permute_blocks(weights: Iterable[tuple[Tensor, Order]], mover: Mover) -> int:
    """Permute each of (x, order) in place; the bytes of scratch it took.

    On CUDA none; on a CPU one block, `cpu.mover.SCRATCH_BYTES` at most, for each thread that computes.
    x: (len(order) x block_rows, columns) or (len(order) x block_rows,), contiguous, of 1, 2 or 4 byte elements.
    Errors: ValueError for any other, and nothing is permuted.
    """
    alike: dict[tuple[Order, torch.Size, torch.dtype], list[Tensor]] = {}
    for x, order in weights:
        blocks = as_blocks(x, len(order))
        alike.setdefault((order, blocks.shape, blocks.dtype), []).append(blocks)
    return max((mover.permute(stacks, order) for (order, *_), stacks in alike.items()), default=0)


def as_blocks(x: Tensor, num_blocks: int) -> Tensor:
    """(num_blocks, block_rows, columns) integer view of a weight or bias."""
    if x.element_size() not in INTEGERS:
        raise ValueError(f"dtype {x.dtype} has {x.element_size()} bytes; 1, 2 and 4 are supported")
    if not x.is_contiguous() or x.shape[0] % num_blocks:
        raise ValueError(f"shape {tuple(x.shape)}, strides {x.stride()} is no contiguous stack of {num_blocks} blocks")
    return x.detach().view(INTEGERS[x.element_size()]).view(num_blocks, x.shape[0] // num_blocks, -1)


def permute_each_by_triton(stacks: Sequence[Tensor], order: Order) -> int:
    for blocks in stacks:
        permute_triton(blocks, order)
    return 0


def permute_triton(blocks: Tensor, order: Order) -> None:
    """The same by the Triton kernel (on CUDA, or on a CPU in Triton's interpreter)."""
    table, block_elements = _round_table(order, blocks.device), blocks[0].numel()
    num_rounds, _, lanes = table.shape
    if num_rounds and block_elements:
        tile = fibre_elements(lanes, blocks.element_size())
        grid = (triton.cdiv(block_elements, tile),)
        permute_kernel[grid](blocks, table, num_rounds, block_elements, LANES=lanes, TILE=tile, num_warps=WARPS)


def fibre_elements(lanes: int, element_bytes: int) -> int:
    """How many elements of each block a program of the permutation owns."""
    return PROGRAM_BYTES // (lanes * element_bytes)


@lru_cache(maxsize=1 << 6)  # layers are alike
def _round_table(order: Order, device: torch.device) -> Tensor:
    """(rounds, 2, lanes) int32: the destinations and the sources of each round, -1 for a lane without any."""
    moves = rounds(order)
    lanes = 1 << (max(map(len, moves), default=1) - 1).bit_length()
    table = torch.full((len(moves), 2, lanes), -1, dtype=torch.int32)
    for row, round_moves in zip(table, moves, strict=True):
        row[:, : len(round_moves)] = torch.tensor(round_moves, dtype=torch.int32).t()
    return table.to(device)


def rounds(order: Order, lanes: int = LANES) -> list[list[Move]]:
    """Permutations of at most `lanes` blocks each that one after the other make `order`.

    A cycle that does not fit is cut in two that share a block: (a b c d) is (a b) and then (b c d). The first leaves in
    b what the last block of the whole cycle gets, so that a cut costs one more move and nothing is set aside.
    """
    found: list[list[Move]] = [[]]
    for cycle in cycles(order):
        while len(found[-1]) + len(cycle) > lanes:
            room = lanes - len(found[-1])
            if room > 1:
                found[-1] += _turn(cycle[:room])
                cycle = cycle[room - 1 :]
            found.append([])
        found[-1] += _turn(cycle)
    return [moves for moves in found if moves]


def _turn(cycle: list[int]) -> list[Move]:
    return list(zip(cycle, cycle[1:] + cycle[:1], strict=True))


# --------------------------------------------------------------------------------------------------------- copy


def copy_pieces(copies: list[Copy], mover: Mover) -> None:
    """destination <- source for each pair, in no particular order; no destination may overlap anything else.

    copies: views of equal shape and dtype, (rows, columns) with any row stride and column stride 1, or (columns,);
    all on one device. Errors: ValueError for any other.
    """
    copies = [(_as_matrix(destination), _as_matrix(source)) for destination, source in copies]
    for destination, source in copies:
        _check_copy(destination, source)
    copies = [(destination, source) for destination, source in copies if destination.numel()]
    if copies:
        mover.copy(copies)


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


def copy_triton(copies: Sequence[Copy]) -> None:
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


def copy_table(copies: Sequence[Copy]) -> tuple[Tensor, int]:
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


BY_TRITON = Mover(permute_each_by_triton, copy_triton)


# ------------------------------------------------------------------------------------------------------ kernels


class CompiledKernel(Protocol):
    """kernel[grid](arguments): what the compiler makes of a function, whose arguments are of other types inside."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


if triton is not None:
    jit: Callable[[Callable[..., None]], CompiledKernel] = triton.jit

    @jit
    def permute_kernel(
        data: tl.tensor,
        table: tl.tensor,
        num_rounds: tl.tensor,
        block_elements: tl.tensor,
        LANES: tl.constexpr,
        TILE: tl.constexpr,
    ) -> None:
        lane = tl.arange(0, LANES)
        element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        for _ in range(num_rounds):
            destination = tl.load(table + lane).to(tl.int64)
            source = tl.load(table + LANES + lane).to(tl.int64)
            mask = (source >= 0)[:, None] & (element < block_elements)[None, :]
            fibre = tl.load(data + (source * block_elements)[:, None] + element[None, :], mask=mask)
            # without this a thread could store over what another has yet to load: the PTX has no barrier
            tl.debug_barrier()
            tl.store(data + (destination * block_elements)[:, None] + element[None, :], fibre, mask=mask)
            tl.debug_barrier()  # nor before the next round, which may load what another thread stores in this one
            table += 2 * LANES

    @jit
    def copy_kernel(
        table: tl.tensor,
        owners: tl.tensor,
        ELEMENT: tl.constexpr,
        FIELDS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ) -> None:
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
