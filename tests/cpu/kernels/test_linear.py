"""Products of few rows against float64, for both widths of vectors."""

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.kernels.linear import linear
from tests.grids import each

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.usefixtures("needs_kernels"),
    pytest.mark.usefixtures("kernels"),
]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # relative to the largest value; a bfloat16 is rounded once
# four rows and four outputs make a tile; 9 rows, 17 with AVX2, 16 in bfloat16, have the weight turned, 256 inner
# dimensions and 32 outputs at a time
ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 18, 29, 33, 64)
SHAPES = ((1, 1), (7, 5), (16, 16), (48, 80), (31, 67), (256, 64), (272, 112), (352, 96), (672, 256))


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == x.dtype and y.shape == right.shape and y.is_contiguous()
    assert (y.double() - right).abs().max() <= TOLERANCES[x.dtype] * right.abs().max().clamp_min(1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=ROWS, shape=SHAPES)
def test_it_equals_its_equation(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    inner, outputs = shape
    x, weight = drawn(rows, inner, seed=1, dtype=dtype), drawn(outputs, inner, seed=2, dtype=dtype)
    bias = drawn(outputs, seed=3, dtype=dtype)
    check(linear(x, weight), x, weight)
    check(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_by_hand(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 0.5]], dtype=dtype)
    weight = torch.tensor([[1.0, 0.0, -1.0], [2.0, 2.0, 2.0]], dtype=dtype)
    assert linear(x, weight).tolist() == [[-2.0, 12.0], [-0.5, -1.0]]
    assert linear(x, weight, torch.tensor([0.5, 1.0], dtype=dtype)).tolist() == [[-1.5, 13.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=(3, 20), width=(310, 311))
def test_rows_of_larger_tensors_are_read_where_they_are_and_nothing_else(
    width: int, rows: int, dtype: torch.dtype
) -> None:
    around_x, around_weight = (torch.full((size, width), torch.nan, dtype=dtype) for size in (rows, 96))
    x, weight = around_x[:, 3:291], around_weight[:, 17:305]
    x.copy_(drawn(rows, 288, seed=1, dtype=dtype))
    weight.copy_(drawn(96, 288, seed=2, dtype=dtype))
    check(linear(x, weight), x, weight)
    turned = x.t().contiguous().t()  # by columns
    check(linear(turned, weight), x, weight)


@pytest.mark.parametrize(
    ("dtype", "rows", "counts"),
    [
        (torch.float32, 8, (1, 2, 3, 5, 7)),
        (torch.float32, 80, (17, 18, 20, 24, 29, 43)),
        (torch.bfloat16, 15, (1, 2, 3, 5, 7)),
        (torch.bfloat16, 80, (16, 17, 18, 20, 24, 29, 43)),
    ],
    ids=str,
)
@each(shape=((256, 64), (31, 67), (672, 256)))
def test_a_row_has_the_same_bits_among_others(
    dtype: torch.dtype, rows: int, counts: tuple[int, ...], shape: tuple[int, int]
) -> None:
    inner, outputs = shape
    x, weight = drawn(rows, inner, seed=1, dtype=dtype), drawn(outputs, inner, seed=2, dtype=dtype)
    bias = drawn(outputs, seed=3, dtype=dtype)
    together = linear(x, weight, bias)
    for count in counts:
        for first in range(0, rows - count, count):
            alone = linear(x[first : first + count], weight, bias)
            assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=(5, 30))
def test_threads_change_no_bit(rows: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, 256, seed=1, dtype=dtype), drawn(1040, 256, seed=2, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x, weight)
        torch.set_num_threads(4)
        assert torch.equal(linear(x, weight), alone)
    finally:
        torch.set_num_threads(before)
