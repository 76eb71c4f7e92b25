"""Head blocks permuted in place, against index_select, bit for bit.

The cycles run here. The Triton kernel runs in Triton's interpreter, in one process of its own, which is this file as a
script; and it is compiled for a GPU, which needs none, to read in the PTX what the interpreter cannot show: that all
loads come before all stores. A test marked `gpu` runs it on one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.reshard import kernel
from hybridflow.reshard.kernel import (
    COLUMN_TILE,
    INTEGERS,
    as_blocks,
    permute_cycles,
    permute_heads,
    permute_triton,
    triton,
)
from hybridflow.reshard.plan import head_order, inverse

ROOT = Path(__file__).resolve().parents[2]
DTYPES = [
    *[torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16],
    *[torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8],
]
# (heads, kv heads, head_dim, columns); columns None: a bias
SHAPES = [
    (4, 2, 3, 5),
    (6, 2, 2, 1),
    (4, 2, 4, None),
    (2, 2, 3, 7),
    (3, 1, 2, 4),  # one key/value head: the order is the identity
    (8, 4, 2, COLUMN_TILE),
    (4, 2, 1, 2 * COLUMN_TILE + 3),
    (9, 3, 2, COLUMN_TILE - 1),
]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MARGIN = 8  # elements of the flat buffer before and after the weight

Shape = tuple[int, int, int, int | None]
Permute = Callable[[Tensor, tuple[int, ...]], object]


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


def triton_permute(x: Tensor, order: tuple[int, ...]) -> None:
    permute_triton(as_blocks(x, len(order)), order)


# ------------------------------------------------------------------------------------------------ on a CPU


@EACH_SHAPE
@EACH_DTYPE
def test_cycles_equal_index_select_bitwise(shape: Shape, dtype: torch.dtype) -> None:
    check_permutation(shape, dtype, permute_heads)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (1, 2, 3, 0), (3, 0, 2, 1), (2, 3, 1, 0)])
def test_cycles_of_any_permutation_by_hand(order: tuple[int, ...]) -> None:
    x = torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0], [30.0, 31.0]])
    permute_heads(x, order)
    assert x.tolist() == [[10.0 * i, 10.0 * i + 1] for i in order]


def test_nan_payloads_survive() -> None:
    payloads = [0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0x7FABCDEF]  # quiet and signalling
    x = torch.tensor(payloads, dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    permute_heads(x, (3, 0, 1, 2))
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


@EACH_SHAPE
def test_scratch_is_one_head_block(shape: Shape) -> None:
    _, weight, order = weight_in_buffer(shape, torch.float32)
    one_block = shape[2] * (shape[3] or 1) * 4
    with Allocations() as allocations:
        returned = permute_heads(weight, order)
    assert returned == one_block
    assert allocations.sizes == [one_block]


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
        permute_cycles(blocks, (0, 2, 1, 3))
    assert [block for block in written if 0 <= block < 4] == [1, 2]
    assert len(written) == 3  # one more, to the scratch


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_dtypes_of_eight_bytes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=re.escape(f"dtype {dtype} has 8 bytes; 1, 2 and 4 are supported")):
        permute_heads(torch.zeros(4, dtype=dtype), (1, 0))


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
        permute_heads(x, (1, 0))


# ------------------------------------------------------------------------------------------ Triton's kernel

TRITON_CASES = [
    *[(shape, torch.bfloat16) for shape in SHAPES],
    *[((4, 2, 2, 5), dtype) for dtype in DTYPES],
    ((6, 2, 1, COLUMN_TILE + 1), torch.int8),
    ((6, 2, 1, COLUMN_TILE + 1), torch.float32),
]
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")


@needs_triton
def test_the_triton_kernel_equals_index_select_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(TRITON_CASES)} permutations equal"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_triton_kernel_equals_index_select_on_a_gpu() -> None:
    real = [(32, 8, 128, 4096), (28, 4, 128, 3584), (16, 8, 64, 1000)]
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for shape, dtype in cases + [(shape, torch.bfloat16) for shape in real] * 5:  # a race shows now and then
        check_permutation(shape, dtype, permute_heads, device="cuda")


def memory_operations(jitted: Any, element: str, padded_blocks: int) -> str:
    """Global loads, global stores and barriers of a kernel's PTX in their order: "L", "S" and "B"."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"PADDED_BLOCKS": padded_blocks, "TILE": COLUMN_TILE}
    pointers = {"data": f"*{element}", "sources": "*i32"}
    integers = dict.fromkeys(("num_blocks", "head_dim", "columns"), "i32")
    signature = {**pointers, **integers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    letters = {"ld.global": "L", "st.global": "S", "bar.sync": "B"}
    return "".join(letters[name] for name in re.findall(r"ld\.global|st\.global|bar\.sync", ptx))


ALL_LOADS_THEN_BARRIER_THEN_STORES = r"[LB]*LB+S+"


@needs_triton
@pytest.mark.parametrize(("element", "padded_blocks"), [("i8", 8), ("i16", 8), ("i16", 64), ("i32", 8)])
def test_the_ptx_has_a_barrier_between_the_loads_and_the_stores(element: str, padded_blocks: int) -> None:
    operations = memory_operations(kernel.permute_kernel, element, padded_blocks)
    assert re.fullmatch(ALL_LOADS_THEN_BARRIER_THEN_STORES, operations), operations


@needs_triton
def test_triton_still_needs_to_be_told_the_barrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel without tl.debug_barrier() has none: the line is needed, and the test above can fail."""
    source = Path(kernel.__file__).read_text()
    assert source.count("        tl.debug_barrier()\n") == 1
    (tmp_path / "kernel_without_barrier.py").write_text(source.replace("        tl.debug_barrier()\n", ""))
    monkeypatch.syspath_prepend(tmp_path)
    import kernel_without_barrier

    operations = memory_operations(kernel_without_barrier.permute_kernel, "i16", 8)
    assert re.fullmatch(r"L+S+", operations), operations


def interpret() -> None:
    assert type(kernel.permute_kernel).__name__ == "InterpretedFunction", type(kernel.permute_kernel)
    for shape, dtype in TRITON_CASES:
        check_permutation(shape, dtype, triton_permute)
    print(f"{len(TRITON_CASES)} permutations equal")


if __name__ == "__main__":
    interpret()
