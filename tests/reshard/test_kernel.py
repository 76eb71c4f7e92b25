"""Row blocks permuted in place against index_select, and copies of pieces against copy_, bit for bit.

What a CPU does runs here. The Triton kernels run in Triton's interpreter, in one process of its own, which is this
file as a script; and they are compiled for a GPU, which needs none, to read in the PTX what the interpreter cannot
show: that all loads of a permutation come before all its stores. Tests marked `gpu` run them on one.
"""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.cpu import mover as cpu_mover
from hybridflow.reshard import execute, kernel
from hybridflow.reshard.execute import select_mover
from hybridflow.reshard.kernel import (
    COPY_COLUMNS,
    COPY_ROWS,
    INTEGERS,
    LANES,
    Copy,
    as_blocks,
    copy_pieces,
    copy_shapes,
    copy_table,
    fibre_elements,
    permute_blocks,
    rounds,
    triton,
)
from hybridflow.reshard.plan import inverse

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
DTYPES = [
    *[torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16],
    *[torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8],
]
FIBRE = fibre_elements(8, 2)  # of 8 blocks of 16-bit elements
# (query heads, key/value heads, head_dim, columns) of a QKV weight; columns None: a bias
SHAPES = [
    (4, 2, 3, 5),
    (6, 2, 2, 1),
    (4, 2, 4, None),
    (2, 2, 3, 7),
    (3, 1, 2, 4),  # one key/value head: the order is the identity
    (8, 4, 2, 128),
    (4, 2, 1, 2 * FIBRE + 3),
    (9, 3, 1, FIBRE - 1),
]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MARGIN = 8  # elements of the flat buffer before and after the weight

Shape = tuple[int, int, int, int | None]
Permute = Callable[[Tensor, tuple[int, ...]], object]


def head_order(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Where each head of [all q; all k; all v] stands in [q.., k, v] per key/value group."""
    blocks = torch.arange(num_heads + 2 * num_kv_heads).view(num_kv_heads, -1)
    queries, keys, values = blocks[:, :-2], blocks[:, -2], blocks[:, -1]
    return tuple(torch.cat([queries.flatten(), keys, values]).tolist())


def random_bits(size: int, dtype: torch.dtype) -> Tensor:
    """Every bit pattern may occur, and NaNs with unlike payloads do."""
    generator = torch.Generator().manual_seed(size)
    integers = INTEGERS[dtype.itemsize]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max + 1, (size,), generator=generator, dtype=torch.int64).to(integers)
    if dtype.is_floating_point:
        nans = torch.tensor([float("nan")]).to(dtype).view(integers).item()
        bits[::3] = torch.where(bits[::3] & 1 == 1, nans, nans | limits.min)  # of both signs
        if dtype.itemsize > 1:
            bits[1::5] = nans ^ (1 + (bits[1::5] & 7))  # of eight payloads
    return bits.view(dtype)


def weight_in_buffer(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """(flat buffer, a weight or bias that is a view of its middle, order)."""
    heads, kv_heads, head_dim, columns = shape
    order = head_order(heads, kv_heads)
    size = len(order) * head_dim * (columns or 1)
    flat = random_bits(size + 2 * MARGIN, dtype).to(device)
    weight = flat[MARGIN:-MARGIN]
    return flat, weight if columns is None else weight.view(-1, columns), order


def bits(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.element_size()]).cpu()


def permuted_reference(flat: Tensor, order: tuple[int, ...]) -> Tensor:
    """The bits of the flat buffer with the blocks of its middle taken in `order`."""
    whole = bits(flat).clone()
    middle = whole[MARGIN:-MARGIN]
    middle.copy_(middle.clone().view(len(order), -1).index_select(0, torch.tensor(order)).flatten())
    return whole


def check_permutation(shape: Shape, dtype: torch.dtype, permute: Permute, device: str = "cpu") -> None:
    """`permute` equals index_select, its inverse restores, and what lies beside the weight is not touched."""
    flat, weight, order = weight_in_buffer(shape, dtype, device)
    before, expected = bits(flat).clone(), permuted_reference(flat, order)
    assert torch.equal(before, expected) == (shape[1] == 1), "a test whose order moves nothing"
    permute(weight, order)
    assert torch.equal(bits(flat), expected), f"{shape} {dtype}: not the reference"
    permute(weight, inverse(order))
    assert torch.equal(bits(flat), before), f"{shape} {dtype}: the inverse does not restore"


def permute(x: Tensor, order: tuple[int, ...]) -> int:
    return permute_blocks([(x, order)], select_mover(x.device))


def copy(copies: list[Copy]) -> None:
    copy_pieces(copies, select_mover(copies[0][0].device if copies else CPU))


def triton_permute(x: Tensor, order: tuple[int, ...]) -> None:
    permute_blocks([(x, order)], kernel.BY_TRITON)


def triton_copy(copies: list[Copy]) -> None:
    copy_pieces(copies, kernel.BY_TRITON)


def table_of(copies: list[Copy]) -> tuple[Tensor, int]:
    return copy_table(torch.tensor([[x.data_ptr() for x in copy] for copy in copies]), copy_shapes(copies))


# ------------------------------------------------------------------------------------------------ on a CPU


@pytest.fixture(params=[pytest.param("C", marks=pytest.mark.compiles), "torch"])
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(execute, "library", lambda: None)
    else:
        request.getfixturevalue("needs_kernels")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EACH_WAY = pytest.mark.usefixtures("on_a_cpu")


@EACH_WAY
@EACH_SHAPE
@EACH_DTYPE
def test_cycles_equal_index_select_bitwise(shape: Shape, dtype: torch.dtype) -> None:
    check_permutation(shape, dtype, permute)


@EACH_WAY
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (1, 2, 3, 0), (3, 0, 2, 1), (2, 3, 1, 0)])
def test_cycles_of_any_permutation_by_hand(order: tuple[int, ...]) -> None:
    x = torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0], [30.0, 31.0]])
    permute(x, order)
    assert x.tolist() == [[10.0 * i, 10.0 * i + 1] for i in order]


@pytest.mark.parametrize(
    ("order", "lanes", "expected"),
    [
        ((0, 1, 2), 2, []),
        ((1, 0, 2, 4, 3), 4, [[(0, 1), (1, 0), (3, 4), (4, 3)]]),
        # (0 1 2 3) is (0 1 2) and then (2 3)
        ((1, 2, 3, 0), 3, [[(0, 1), (1, 2), (2, 0)], [(2, 3), (3, 2)]]),
        # one lane is left after (0 1): too few for a part of (2 3)
        ((1, 0, 3, 2), 3, [[(0, 1), (1, 0)], [(2, 3), (3, 2)]]),
    ],
)
def test_rounds_by_hand(order: tuple[int, ...], lanes: int, expected: list) -> None:
    assert rounds(order, lanes) == expected


@pytest.mark.parametrize("num_blocks", [1, 2, 63, 64, 65, 512, 16_384])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_one_after_the_other_make_the_order(num_blocks: int, seed: int) -> None:
    order = tuple(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist())
    held = list(range(num_blocks))
    for moves in rounds(order):
        assert 1 < len(moves) <= LANES
        assert len({to for to, _ in moves}) == len(moves) and {to for to, _ in moves} == {at for _, at in moves}
        before = list(held)
        for to, at in moves:
            held[to] = before[at]
    assert tuple(held) == order
    moved = sum(map(len, rounds(order)))
    assert moved <= num_blocks * LANES / (LANES - 1) + 1  # a block too many for each cut


@EACH_WAY
def test_weights_of_many_kinds_are_permuted_at_once() -> None:
    """Those alike by one call, the others each with its order."""
    kinds = [((4, 2, 3, 5), torch.float32), ((6, 2, 2, 1), torch.int8), ((4, 2, 3, 5), torch.bfloat16)]
    cases = [weight_in_buffer(shape, dtype) for shape, dtype in kinds * 3]
    expected = [permuted_reference(flat, order) for flat, _, order in cases]
    assert (
        permute_blocks([(weight, order) for _, weight, order in cases], select_mover(CPU)) == 3 * 5 * 4
    )  # a head of the largest
    for (flat, *_), right in zip(cases, expected, strict=True):
        assert torch.equal(bits(flat), right)
    assert permute_blocks([], select_mover(CPU)) == 0


@pytest.mark.compiles
@pytest.mark.usefixtures("needs_kernels")
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_the_blocks_and_each_has_its_scratch(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (8, 4, 2, 128)
    monkeypatch.setattr(cpu_mover, "SCRATCH_BYTES", 96)  # of the 1,024 bytes of a block
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        check_permutation(shape, torch.float32, permute)
        _, weight, order = weight_in_buffer(shape, torch.float32)
        assert permute(weight, order) == 96 * num_threads
    finally:
        torch.set_num_threads(before)


@EACH_WAY
def test_nan_payloads_survive() -> None:
    payloads = [0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0x7FABCDEF]  # quiet and signalling
    x = torch.tensor(payloads, dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    permute(x, (3, 0, 1, 2))
    assert x.view(torch.int32).tolist() == [payloads[i] for i in (3, 0, 1, 2)]


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operator returns and was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.sizes.append(out.untyped_storage().nbytes())
        return out


@EACH_WAY
@EACH_SHAPE
def test_scratch_is_one_block(shape: Shape) -> None:
    _, weight, order = weight_in_buffer(shape, torch.float32)
    scratch = block_bytes(shape) if shape[1] > 1 else 0  # of one key/value head nothing moves
    with Allocations() as allocations:
        returned = permute(weight, order)
    assert returned == scratch
    assert allocations.sizes == [scratch] * (scratch > 0)


def block_bytes(shape: Shape) -> int:
    """Of float32."""
    return shape[2] * (shape[3] or 1) * 4


@EACH_WAY
@EACH_SHAPE
@pytest.mark.parametrize("limit", [4, 12, 16])
def test_scratch_is_bounded_and_the_result_the_same(shape: Shape, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_mover, "SCRATCH_BYTES", limit)
    check_permutation(shape, torch.float32, permute)
    _, weight, order = weight_in_buffer(shape, torch.float32)
    with Allocations() as allocations:
        returned = permute(weight, order)
    assert returned == (min(limit, block_bytes(shape)) if shape[1] > 1 else 0)
    assert allocations.sizes == [returned] * (returned > 0)


@EACH_WAY
def test_the_bound_is_a_quarter_of_a_mebibyte() -> None:
    x = torch.arange(2 * 600 * 500, dtype=torch.int32).view(-1, 500)  # two blocks of 1.2 MB
    assert permute(x, (1, 0)) == 1 << 18
    assert torch.equal(x.flatten(), torch.arange(600_000, dtype=torch.int32).roll(300_000))


def test_blocks_that_stay_are_not_written() -> None:
    x = torch.arange(8.0).view(4, 2)
    blocks = as_blocks(x, 4)
    written = []

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                written.append((args[0].data_ptr() - x.data_ptr()) // 8)
            return func(*args, **(kwargs or {}))

    with Writes():
        cpu_mover.permute_cycles(blocks, (0, 2, 1, 3))
    assert [block for block in written if 0 <= block < 4] == [1, 2]
    assert len(written) == 3  # one more, to the scratch


# -------------------------------------------------------------------------------------------- copies of pieces

COPY_OFFSETS = (0, 1)  # elements by which all addresses are off a multiple of 8 bytes
# (rows, columns, destination row stride, source row stride)
COPIES = [
    (1, 1, 1, 1),
    (3, 4, 4, 8),
    (5, 7, 16, 7),
    (COPY_ROWS, COPY_COLUMNS, COPY_COLUMNS, COPY_COLUMNS),
    (2 * COPY_ROWS + 1, 12, 24, 12),
    (2, 2 * COPY_COLUMNS + 8, 3 * COPY_COLUMNS, 2 * COPY_COLUMNS + 8),
]
GAP = 3  # elements between two destinations


def strided(flat: Tensor, start: int, rows: int, columns: int, stride: int) -> tuple[Tensor, int]:
    """(a view of rows x columns from `start` of a flat buffer, where it ends)."""
    end = start + (rows - 1) * stride + columns
    return flat.as_strided((rows, columns), (stride, 1), start), end


def check_copies(dtype: torch.dtype, offset: int, copy: Callable[[list[Copy]], None], device: str = "cpu") -> None:
    """Every destination equals its source, and what lies between the rows and around them is not touched."""
    source = random_bits(20_000, dtype).to(device)
    flat = random_bits(20_001, dtype).to(device)
    expected = bits(flat).clone()
    copies, to, start = [], offset, offset
    for rows, columns, to_stride, stride in COPIES:
        destination, to_end = strided(flat, to, rows, columns, to_stride)
        view, end = strided(source, start, rows, columns, stride)
        strided(expected, to, rows, columns, to_stride)[0].copy_(bits(view))
        copies.append((destination, view))
        to, start = to_end + GAP, end
    copy(copies)
    assert torch.equal(bits(flat), expected), f"{dtype} {offset}: not the reference"


@EACH_DTYPE
@pytest.mark.parametrize("offset", COPY_OFFSETS)
def test_copies_land_bitwise_and_nothing_else_is_touched(dtype: torch.dtype, offset: int) -> None:
    check_copies(dtype, offset, copy)


def test_copies_by_hand() -> None:
    engine, training = torch.zeros(4, 5), torch.arange(1.0, 13.0).view(3, 4)
    vector = torch.zeros(6)
    copy(
        [
            (engine[1:3, 2:4], training[:2, 1:3]),
            (engine[3:, :1], training[2:, 3:]),
            (vector[2:5], training[0, :3]),
            (vector[:0], training[0, :0]),
        ]
    )
    assert engine.tolist() == [[0, 0, 0, 0, 0], [0, 0, 2, 3, 0], [0, 0, 6, 7, 0], [12, 0, 0, 0, 0]]
    assert vector.tolist() == [0, 0, 1, 2, 3, 0]
    copy([])


def test_copies_of_parameters_record_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    copy([(parameter[:1], torch.nn.Parameter(torch.ones(1, 2)))])
    assert parameter.tolist() == [[1, 1], [0, 0]]


def test_the_table_of_copies_by_hand() -> None:
    a = torch.zeros(64, dtype=torch.int16)  # its storage begins at a multiple of 8 bytes
    wide = [(a[:32].view(4, 8)[:, :4], a[32:48].view(4, 4))]
    table, element_bytes = table_of(wide)
    at = a.data_ptr()
    assert element_bytes == 8  # rows of 4 x 2 bytes
    assert table.tolist() == [[at, at + 64, 4, 1, 2, 1, 1]]
    one_row = (a[:21].view(3, 7)[:1, :4], a[32:36].view(1, 4))  # a stride of 7, which nothing uses
    assert table_of([*wide, one_row])[1] == 8
    narrow = (a[1:15].view(2, 7), a[17:31].view(2, 7))
    table, element_bytes = table_of([*wide, narrow])
    assert element_bytes == 2
    assert table.tolist() == [[at, at + 64, 4, 4, 8, 4, 1], [at + 2, at + 34, 2, 7, 7, 7, 1]]


@pytest.mark.parametrize(
    ("destination", "source", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), "cannot copy (3, 2) torch.float32 on cpu to (2, 3) torch.float32"),
        (torch.zeros(2), torch.zeros(2).int(), "cannot copy (1, 2) torch.int32"),
        (torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), "a copy is between vectors or matrices alike"),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), "strides (1, 2): the elements of a row must be neighbours"),
    ],
)
def test_copies_that_are_refused(destination: Tensor, source: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        copy([(destination, source)])


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_dtypes_of_eight_bytes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=re.escape(f"dtype {dtype} has 8 bytes; 1, 2 and 4 are supported")):
        permute(torch.zeros(4, dtype=dtype), (1, 0))


def test_nothing_is_permuted_where_one_is_refused() -> None:
    x = torch.arange(4.0)
    with pytest.raises(ValueError, match="no contiguous stack"):
        permute_blocks([(x, (1, 0)), (torch.zeros(5), (1, 0))], select_mover(CPU))
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(6, 4).t(), "shape (4, 6), strides (1, 4)"),
        (torch.zeros(4, 6)[:, :3], "shape (4, 3), strides (6, 1)"),
        (torch.zeros(5, 6), "shape (5, 6), strides (6, 1)"),
    ],
)
def test_what_is_no_contiguous_stack_of_blocks_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{message} is no contiguous stack of 2 blocks")):
        permute(x, (1, 0))


# ------------------------------------------------------------------------------------- tables that are kept


def move_storage(x: Tensor) -> None:
    """To another address, as memory that was given back and taken again: what is in it is anything."""
    storage, before, kept = x.untyped_storage(), x.untyped_storage().data_ptr(), []
    size = storage.nbytes()
    while storage.data_ptr() in (0, before):
        storage.resize_(0)
        kept.append(torch.empty(size, dtype=torch.uint8))  # takes the place
        storage.resize_(size)


def test_places_are_asked_once_a_storage_and_follow_it() -> None:
    one, other = torch.zeros(64), torch.zeros(32, dtype=torch.bfloat16)
    tensors = [one[8:16], other[3:], one[32:].view(4, 8)[1:], one]
    places = kernel.Places(tensors)
    assert len(places._firsts) == 2
    assert places.moved() and not places.moved()
    assert places.addresses().tolist() == [x.data_ptr() for x in tensors]
    before = one.data_ptr()
    move_storage(one)
    assert one.data_ptr() != before and places.moved() and not places.moved()
    assert places.addresses().tolist() == [x.data_ptr() for x in tensors]


def test_places_of_memory_that_is_not_there_yet() -> None:
    x = torch.zeros(64)
    first = x[16:]
    x.untyped_storage().resize_(0)
    places = kernel.Places([first, x])
    x.untyped_storage().resize_(256)
    assert places.moved() and places.addresses().tolist() == [x.data_ptr() + 64, x.data_ptr()]


class CountingKernel:
    """In the place of one of Triton's: the tables that it was launched with, and the grids."""

    def __init__(self) -> None:
        self.tables: list[Tensor] = []
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(table: Tensor, *others: Tensor, **named: object) -> None:
            self.tables.append(table)
            self.grids.append(grid)

        return launch


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingKernel:
    found = CountingKernel()
    for name in ("copy_kernel", "permute_kernel"):
        monkeypatch.setattr(kernel, name, found, raising=False)
    return found


needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")


@needs_triton
def test_copies_are_one_launch_whose_table_stays_until_memory_moves(counting: CountingKernel) -> None:
    source, destination = torch.zeros(96, 16), torch.zeros(96, 16)
    run = kernel.prepared_copies(zip(destination.split(8), source.split(8), strict=True), kernel.BY_TRITON)
    for _ in range(3):
        run()
    assert len(counting.tables) == 3 and len({id(table) for table in counting.tables}) == 1
    assert counting.grids == [(12,)] * 3  # a tile a piece
    move_storage(source)
    run()
    last = counting.tables[-1]
    assert last is not counting.tables[0]
    assert last[:, 1].tolist() == [source.data_ptr() + 8 * 64 * i for i in range(12)]
    assert last[:, 0].tolist() == [destination.data_ptr() + 8 * 64 * i for i in range(12)]


@needs_triton
def test_weights_whose_orders_take_as_many_lanes_are_permuted_in_one_launch(counting: CountingKernel) -> None:
    orders = [(1, 0, 2, 3), (0, 1, 3, 2), (3, 0, 1, 2), (0, 1, 2, 3)]  # 2, 2, 4 lanes, and nothing to do
    weights = [torch.zeros(8, 64), torch.zeros(4, 32), torch.zeros(4, 16), torch.zeros(4, 4)]
    run = kernel.prepared_permutation(zip(weights, orders, strict=True), kernel.BY_TRITON)
    assert run() == run() == 0
    two, four = counting.tables[:2]
    assert [id(table) for table in counting.tables[2:]] == [id(two), id(four)]
    # addresses, elements of 8 bytes in a block, where the rounds begin, their number, the first program
    assert two.tolist() == [[weights[0].data_ptr(), 64, 0, 1, 0], [weights[1].data_ptr(), 16, 4, 1, 1]]
    assert four.tolist() == [[weights[2].data_ptr(), 8, 0, 1, 0]]
    assert counting.grids == [(2,), (1,)] * 2


# ------------------------------------------------------------------------------------------ Triton's kernel

TRITON_CASES = [
    *[(shape, torch.bfloat16) for shape in SHAPES],
    *[((4, 2, 2, 5), dtype) for dtype in DTYPES],
    ((6, 2, 1, FIBRE + 1), torch.int8),
    ((6, 2, 1, FIBRE + 1), torch.float32),
    # 512 and 16,384 blocks, moved in 8 and in 260 rounds or so: the pieces of 128 experts, and far more
    ((256, 128, 2, 3), torch.bfloat16),
    ((8192, 4096, 1, 3), torch.int8),
]


@pytest.mark.slow
@needs_triton
def test_the_triton_kernels_equal_torch_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        f"{len(TRITON_CASES)} permutations equal",
        "kept and moved",
        f"{len(DTYPES) * len(COPY_OFFSETS)} lists of copies equal",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_triton_kernel_equals_index_select_on_a_gpu() -> None:
    real = [(32, 8, 128, 4096), (28, 4, 128, 3584), (16, 8, 64, 1000), (256, 128, 64, 512), (8192, 4096, 2, 256)]
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for shape, dtype in cases + [(shape, torch.bfloat16) for shape in real] * 5:  # a race shows now and then
        check_permutation(shape, dtype, permute, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_land_bitwise_on_a_gpu() -> None:
    for dtype in DTYPES:
        for offset in COPY_OFFSETS:
            check_copies(dtype, offset, copy, device="cuda")


def compiled(
    jitted: Any,
    arguments: dict[str, str],
    constants: dict[str, object],
    *,
    multiples_of_16: tuple[str, ...] = (),
    warps: int = 4,
) -> Any:
    """For an H100, of which there need be none; `multiples_of_16`: arguments that are, as Triton finds at a call."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = arguments | dict.fromkeys(constants, "constexpr")
    attributes = {(jitted.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples_of_16}
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def compiled_permutation(jitted: Any, element: str, lanes: int, *, aligned: bool = False) -> Any:
    """aligned: addresses and sizes of blocks are multiples of 16 bytes."""
    import triton.language as tl

    width = int(element[1:]) // 8
    arguments = {"weights": "*i64", "owners": "*i32", "rounds": "*i32"}
    constants = {"ELEMENT": getattr(tl, f"int{8 * width}"), "VECTOR": 16 if aligned else 1}
    constants |= {"FIELDS": kernel.PERMUTE_FIELDS, "LANES": lanes, "TILE": fibre_elements(lanes, width)}
    return compiled(jitted, arguments, constants, multiples_of_16=tuple(arguments), warps=kernel.WARPS)


def memory_operations(jitted: Any, element: str, lanes: int) -> str:
    """Global loads, global stores and barriers of a round, in the order of the PTX: "L", "S" and "B"."""
    ptx = compiled_permutation(jitted, element, lanes).asm["ptx"]
    letters = {"ld.global": "L", "st.global": "S", "bar.sync": "B"}
    return "".join(letters[name] for name in re.findall(r"ld\.global|st\.global|bar\.sync", ptx))


LOADS_THEN_BARRIER_THEN_STORES_THEN_BARRIER = r"[LB]*LB+S+B+"


@needs_triton
@pytest.mark.parametrize(("element", "lanes"), [("i8", 8), ("i16", 8), ("i16", 64), ("i32", 8), ("i64", 64)])
def test_the_ptx_has_a_barrier_between_the_loads_and_the_stores(element: str, lanes: int) -> None:
    operations = memory_operations(kernel.permute_kernel, element, lanes)
    assert re.fullmatch(LOADS_THEN_BARRIER_THEN_STORES_THEN_BARRIER, operations), operations


def resources(binary: bytes, directory: Path) -> dict[str, int]:
    """What a thread of the only function of a compiled kernel takes: REG, STACK and LOCAL among others."""
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    (directory / "kernel.cubin").write_bytes(binary)
    command = [cuobjdump, "--dump-resource-usage", str(directory / "kernel.cubin")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in out.splitlines() if "REG:" in line]
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}


def has_tool(name: str) -> bool:
    try:
        return triton is not None and Path(getattr(triton.knobs.nvidia, name).path).exists()
    except RuntimeError:
        return False


@pytest.mark.skipif(not has_tool("cuobjdump"), reason="needs the cuobjdump that Triton brings")
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("element", ["i8", "i16", "i32", "i64"])
@pytest.mark.parametrize("num_blocks", [2, 8, 48, 512, 16_384])
def test_no_thread_spills_however_many_the_blocks(num_blocks: int, element: str, aligned: bool, tmp_path: Path) -> None:
    """Without rounds a thread held its part of all blocks: of 512 of them it spilled 272 bytes, unaligned 20 kB."""
    order = tuple(range(1, num_blocks)) + (0,)
    _, _, lanes = kernel._round_table(order).shape
    assert lanes == {2: 2, 8: 8, 48: 64, 512: 64, 16_384: 64}[num_blocks]
    used = resources(
        compiled_permutation(kernel.permute_kernel, element, lanes, aligned=aligned).asm["cubin"], tmp_path
    )
    # where nothing is aligned ptxas puts a few bytes aside for 8 blocks, to have more threads at once
    assert used["LOCAL"] == 0 and used["STACK"] <= (24 if num_blocks == 8 and not aligned else 0)
    assert used["REG"] <= (48 if aligned else 128)


@needs_triton
@pytest.mark.parametrize("lanes", [2, 64])
def test_a_permutation_moves_16_bytes_at_a_time_where_addresses_allow(lanes: int) -> None:
    """Their alignment comes from a table, where Triton cannot see it: the kernel says it."""
    ptx = compiled_permutation(kernel.permute_kernel, "i64", lanes, aligned=True).asm["ptx"]
    assert re.findall(r"st\.global\S*", ptx) == ["st.global.v2.b64"] * 2, "32 bytes a thread"
    assert len(re.findall(r"ld\.global\.v2\.b64", ptx)) == 2
    ptx = compiled_permutation(kernel.permute_kernel, "i64", lanes).asm["ptx"]
    assert re.findall(r"st\.global\S*", ptx) == ["st.global.b64"] * 4


@needs_triton
@pytest.mark.parametrize(("element", "bits_moved"), [("int8", 8), ("int16", 16), ("int32", 32), ("int64", 64)])
def test_the_copies_compile_to_accesses_of_their_width(element: str, bits_moved: int) -> None:
    import triton.language as tl

    constants = {"ELEMENT": getattr(tl, element), "FIELDS": kernel.COPY_FIELDS}
    constants |= {"ROWS": COPY_ROWS, "COLUMNS": COPY_COLUMNS}
    ptx = compiled(kernel.copy_kernel, {"table": "*i64", "owners": "*i32"}, constants).asm["ptx"]
    stores = re.findall(r"st\.global[\w.]*\.b(\d+)", ptx)
    assert stores and set(stores) == {str(bits_moved)}, stores


@needs_triton
@pytest.mark.parametrize(("removed", "operations"), [(0, r"L+S+B+"), (1, r"[LB]*LB+S+")])
def test_triton_still_needs_to_be_told_the_barriers(
    removed: int, operations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel without either tl.debug_barrier() lacks it: both are needed, and the test above can fail."""
    parts = Path(kernel.__file__).read_text().split("tl.debug_barrier()")
    assert len(parts) == 3
    name = f"kernel_without_barrier_{removed}"
    first, second = ("pass", "tl.debug_barrier()") if removed == 0 else ("tl.debug_barrier()", "pass")
    (tmp_path / f"{name}.py").write_text(parts[0] + first + parts[1] + second + parts[2])
    monkeypatch.syspath_prepend(tmp_path)
    found = memory_operations(importlib.import_module(name).permute_kernel, "i16", 8)
    assert re.fullmatch(operations, found), found


def check_that_nothing_is_stale() -> None:
    """What was prepared once moves what is there now, at addresses that have changed, of another alignment too."""
    source, destination = torch.zeros(24, 10, dtype=torch.int16), torch.zeros(24, 10, dtype=torch.int16)
    weights = [torch.zeros(6, 9), torch.zeros(12, 5, dtype=torch.bfloat16), torch.zeros(4, 3)]
    orders = [(2, 0, 1), (1, 0, 3, 2), (1, 0)]
    copies = kernel.prepared_copies(zip(destination.split(5), source.split(5), strict=True), kernel.BY_TRITON)
    permutation = kernel.prepared_permutation(zip(weights, orders, strict=True), kernel.BY_TRITON)
    for turn in range(4):
        if turn % 2:
            for x in (source, *weights):
                move_storage(x)
        for number, x in enumerate((source, *weights)):
            x.copy_(torch.arange(x.numel()).view_as(x) + 100 * turn + number)
        expected = [x.view(len(order), -1)[list(order)].view_as(x) for x, order in zip(weights, orders, strict=True)]
        copies()
        permutation()
        assert torch.equal(destination, source), f"turn {turn}: copies"
        for x, right in zip(weights, expected, strict=True):
            assert torch.equal(x, right), f"turn {turn}: permutation"


def interpret() -> None:
    assert type(kernel.permute_kernel).__name__ == "InterpretedFunction", type(kernel.permute_kernel)
    for shape, dtype in TRITON_CASES:
        check_permutation(shape, dtype, triton_permute)
    print(f"{len(TRITON_CASES)} permutations equal")
    check_that_nothing_is_stale()
    print("kept and moved")
    for dtype in DTYPES:
        for offset in COPY_OFFSETS:
            check_copies(dtype, offset, triton_copy)
    print(f"{len(DTYPES) * len(COPY_OFFSETS)} lists of copies equal")


if __name__ == "__main__":
    interpret()
