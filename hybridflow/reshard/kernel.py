"""Row blocks of weights permuted in place, and rectangles copied, all in one launch. Bit for bit.

permutation: block i becomes the former block order[i]; blocks that stay are not touched. On CUDA one Triton kernel
without scratch: a program owns one fibre (the same few elements of every block of a weight), loads it of up to LANES
blocks and stores it permuted. No two programs touch the same element. More blocks than that are permuted in rounds of
LANES, each a separate permutation (see `rounds`): what a program holds in registers does not grow with the blocks.

copying: many small strided copies. On CUDA one Triton kernel for all of them: a program owns one tile of one copy.

Both are prepared once for their tensors by a `Mover`, that of the device, and called as often as the tensors move. The
kernels read addresses, strides and orders from tables, which stay as long as the addresses do. Elements move as
integers, so any dtype arrives, NaN payloads included.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
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
WIDTHS = (8, 4, 2, 1)  # bytes of an element that a kernel moves, the widest first
COPY_FIELDS = 7  # of a row of the table, see `copy_table`
PERMUTE_FIELDS = 5  # likewise, see `PermutationsByTriton`

Copy = tuple[Tensor, Tensor]  # destination, source
Move = tuple[int, int]  # to block, from block
Stacks = tuple[Sequence[Tensor], Order]  # (blocks, ...) integers of one shape, and their order


class Mover(NamedTuple):
    """permutation: of stacks in place; when called, the bytes of scratch that it took.

    copying: destination <- source for each pair of matrices alike.
    """

    permutation: Callable[[Sequence[Stacks]], Callable[[], int]]
    copying: Callable[[Sequence[Copy]], Callable[[], object]]


# ------------------------------------------------------------------------------------------------------ permute


def prepared_permutation(weights: Iterable[tuple[Tensor, Order]], mover: Mover) -> Callable[[], int]:
    """What permutes each of (x, order) in place when called, and returns the bytes of scratch that it took.

    On CUDA none; on a CPU one block, `cpu.mover.SCRATCH_BYTES` at most, for each thread that computes.
    x: (len(order) x block_rows, columns) or (len(order) x block_rows,), contiguous, of 1, 2 or 4 byte elements.
    Errors: ValueError for any other.
    """
    alike: dict[tuple[Order, torch.Size, torch.dtype], list[Tensor]] = {}
    for x, order in weights:
        blocks = as_blocks(x, len(order))
        alike.setdefault((order, blocks.shape, blocks.dtype), []).append(blocks)
    return mover.permutation([(stacks, order) for (order, *_), stacks in alike.items()])


def permute_blocks(weights: Iterable[tuple[Tensor, Order]], mover: Mover) -> int:
    """The same once. Where one of them is refused nothing is permuted."""
    return prepared_permutation(weights, mover)()


def as_blocks(x: Tensor, num_blocks: int) -> Tensor:
    """(num_blocks, block_rows, columns) integer view of a weight or bias."""
    if x.element_size() not in INTEGERS:
        raise ValueError(f"dtype {x.dtype} has {x.element_size()} bytes; 1, 2 and 4 are supported")
    if not x.is_contiguous() or x.shape[0] % num_blocks:
        raise ValueError(f"shape {tuple(x.shape)}, strides {x.stride()} is no contiguous stack of {num_blocks} blocks")
    return x.detach().view(INTEGERS[x.element_size()]).view(num_blocks, x.shape[0] // num_blocks, -1)


class PermutationsByTriton:
    """By the Triton kernel (on CUDA, or on a CPU in Triton's interpreter): one launch for orders of as many lanes.

    The table has a row of PERMUTE_FIELDS int64 for each: address, elements of a block, where the order's rounds begin,
    number of rounds, and the first program.
    """

    def __init__(self, groups: Sequence[Stacks]) -> None:
        found: dict[int, list[tuple[Tensor, Tensor]]] = {}  # lanes -> (blocks, rounds)
        for stacks, order in groups:
            table = _round_table(order)
            found.setdefault(table.shape[-1], []).extend((blocks, table) for blocks in stacks if table.numel())
        self._launches = [_PermutationLaunch(lanes, pairs) for lanes, pairs in found.items() if pairs]

    def __call__(self) -> int:
        for launch in self._launches:
            launch()
        return 0


class _PermutationLaunch:
    def __init__(self, lanes: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._lanes, self._device = lanes, pairs[0][0].device
        self._places = Places([blocks for blocks, _ in pairs])
        orders = list({id(table): table for _, table in pairs}.values())
        starts = torch.tensor([0, *(table.numel() for table in orders)]).cumsum(0).tolist()
        start_of = dict(zip(map(id, orders), starts, strict=False))
        rows = [(start_of[id(table)], len(table), blocks[0].nbytes) for blocks, table in pairs]
        self._starts, self._num_rounds, self._block_bytes = torch.tensor(rows, dtype=torch.int64).unbind(1)
        self._rounds = torch.cat([table.flatten() for table in orders]).to(self._device)

    def __call__(self) -> None:
        if self._places.moved():
            self._make_table(self._places.addresses())
        permute_kernel[(len(self._owners),)](
            self._table,
            self._owners,
            self._rounds,
            ELEMENT=INTEGER_OF_BYTES[self._width],
            VECTOR=self._vector,
            FIELDS=PERMUTE_FIELDS,
            LANES=self._lanes,
            TILE=fibre_elements(self._lanes, self._width),
            num_warps=WARPS,
        )

    def _make_table(self, addresses: Tensor) -> None:
        numbers = torch.stack((addresses, self._block_bytes))
        self._width, self._vector = width_of(numbers), 16 if not (numbers % 16).any() else 1
        elements = self._block_bytes // self._width
        tiles = -(-elements // fibre_elements(self._lanes, self._width))
        table = torch.stack((addresses, elements, self._starts, self._num_rounds, tiles.cumsum(0) - tiles), dim=1)
        self._table, self._owners = table.to(self._device), owners_of(tiles).to(self._device)


def fibre_elements(lanes: int, element_bytes: int) -> int:
    """How many elements of each block a program of the permutation owns."""
    return PROGRAM_BYTES // (lanes * element_bytes)


@lru_cache(maxsize=1 << 6)  # layers are alike
def _round_table(order: Order) -> Tensor:
    """(rounds, 2, lanes) int32: the destinations and the sources of each round, -1 for a lane without any."""
    moves = rounds(order)
    lanes = 1 << (max(map(len, moves), default=1) - 1).bit_length()
    table = torch.full((len(moves), 2, lanes), -1, dtype=torch.int32)
    for row, round_moves in zip(table, moves, strict=True):
        row[:, : len(round_moves)] = torch.tensor(round_moves, dtype=torch.int32).t()
    return table


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


def prepared_copies(copies: Iterable[Copy], mover: Mover) -> Callable[[], object]:
    """What copies destination <- source of each pair when called, in no particular order.

    copies: views of equal shape and dtype, (rows, columns) with any row stride and column stride 1, or (columns,);
    all on one device. No destination may overlap anything else. Errors: ValueError for any other.
    """
    matrices = [(as_matrix(destination), as_matrix(source)) for destination, source in copies]
    for destination, source in matrices:
        _check_copy(destination, source)
    matrices = [(destination, source) for destination, source in matrices if destination.numel()]
    return mover.copying(matrices) if matrices else lambda: None


def copy_pieces(copies: Iterable[Copy], mover: Mover) -> None:
    """The same once."""
    prepared_copies(copies, mover)()


def as_matrix(x: Tensor) -> Tensor:
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


class CopiesByTriton:
    """Of matrices, by one launch of the Triton kernel (on CUDA, or on a CPU in Triton's interpreter)."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._places, self._shapes = Places([x for copy in copies for x in copy]), copy_shapes(copies)
        self._device = copies[0][0].device

    def __call__(self) -> None:
        if self._places.moved():
            self._make_table(self._places.addresses().view(-1, 2))
        copy_kernel[(len(self._owners),)](
            self._table,
            self._owners,
            ELEMENT=INTEGER_OF_BYTES[self._width],
            FIELDS=COPY_FIELDS,
            ROWS=COPY_ROWS,
            COLUMNS=COPY_COLUMNS,
        )

    def _make_table(self, addresses: Tensor) -> None:
        table, self._width = copy_table(addresses, self._shapes)
        tiles = table[:, 6].clone()
        table[:, 6] = tiles.cumsum(0) - tiles
        self._table, self._owners = table.to(self._device), owners_of(tiles).to(self._device)


def copy_shapes(copies: Sequence[Copy]) -> Tensor:
    """(copies, 4) int64: rows, bytes of a row, and bytes from row to row of the destination and of the source."""
    rows = []
    for copy in copies:
        (height, width), size = copy[0].shape, copy[0].element_size()
        # the stride of a single row is never used, and need be no multiple of anything
        strides = [x.stride(0) * size if height > 1 else 0 for x in copy]
        rows.append([height, width * size, *strides])
    return torch.tensor(rows, dtype=torch.int64)


def copy_table(addresses: Tensor, shapes: Tensor) -> tuple[Tensor, int]:
    """(table, bytes of an element): the widest elements that all addresses and rows are made of.

    addresses: (copies, 2) int64, of destination and source. table: (copies, COPY_FIELDS) int64 on the CPU: destination
    and source address in bytes, rows, columns, destination and source row stride in elements, number of tiles.
    """
    width = width_of(torch.cat((addresses, shapes[:, 1:]), dim=1))
    in_elements = shapes[:, 1:] // width
    tiles = -(-shapes[:, 0] // COPY_ROWS) * -(-in_elements[:, 0] // COPY_COLUMNS)
    return torch.cat((addresses, shapes[:, :1], in_elements, tiles[:, None]), dim=1), width


BY_TRITON = Mover(PermutationsByTriton, CopiesByTriton)


# ------------------------------------------------------------------------------------------------------- tables


class Places:
    """Where tensors lie, asked of one tensor of each storage: those of a storage move together."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        numbers: dict[int, int] = {}  # storage -> which
        firsts: dict[int, Tensor] = {}
        for x in tensors:
            storage = x.untyped_storage()._cdata
            firsts.setdefault(numbers.setdefault(storage, len(numbers)), x)
        self._firsts = list(firsts.values())
        self._seen: list[int] | None = None
        self._owners = torch.tensor([numbers[x.untyped_storage()._cdata] for x in tensors])
        self._offsets, self._before = _offsets(tensors), _offsets(self._firsts)

    def moved(self) -> bool:
        """Since the last call; True the first time."""
        now = list(map(Tensor.data_ptr, self._firsts))
        before, self._seen = self._seen, now
        return now != before

    def addresses(self) -> Tensor:
        """(tensors,) int64, as `moved` last saw them."""
        return (torch.tensor(self._seen, dtype=torch.int64) - self._before)[self._owners] + self._offsets


def _offsets(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors,) int64: bytes from the beginning of the storage."""
    return torch.tensor([x.storage_offset() * x.element_size() for x in tensors], dtype=torch.int64)


def width_of(numbers: Tensor) -> int:
    """Bytes of the widest element that addresses and sizes are multiples of."""
    return next(width for width in WIDTHS if not (numbers % width).any())


def owners_of(tiles: Tensor) -> Tensor:
    """(sum of tiles,) int32: program -> row of the table, of which each has as many programs as tiles."""
    return torch.repeat_interleave(torch.arange(len(tiles), dtype=torch.int32), tiles)


# ------------------------------------------------------------------------------------------------------ kernels


class CompiledKernel(Protocol):
    """kernel[grid](arguments): what the compiler makes of a function, whose arguments are of other types inside."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


if triton is not None:
    INTEGER_OF_BYTES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
    jit: Callable[[Callable[..., None]], CompiledKernel] = triton.jit

    @jit
    def permute_kernel(
        weights: tl.tensor,
        owners: tl.tensor,
        rounds: tl.tensor,
        ELEMENT: tl.constexpr,
        VECTOR: tl.constexpr,
        FIELDS: tl.constexpr,
        LANES: tl.constexpr,
        TILE: tl.constexpr,
    ) -> None:
        program = tl.program_id(0)
        weight = weights + tl.load(owners + program).to(tl.int64) * FIELDS
        # addresses and sizes of blocks that are all multiples of 16 bytes are moved 16 bytes at a time
        data = tl.multiple_of(tl.load(weight).to(tl.pointer_type(ELEMENT)), VECTOR)
        block_elements = tl.multiple_of(tl.load(weight + 1), VECTOR * 8 // ELEMENT.primitive_bitwidth)
        table = rounds + tl.load(weight + 2)
        num_rounds = tl.load(weight + 3)
        lane = tl.arange(0, LANES)
        element = (program - tl.load(weight + 4)) * TILE + tl.arange(0, TILE)
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
