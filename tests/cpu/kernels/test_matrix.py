"""Products by the matrix units against float64: as exact as float32, however the matrices lie."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.kernels.matrix import product
from tests.cpu.kernels.modes import has_matrix_units
from tests.cpu.megatron.test_products import LAYOUTS
from tests.grids import each

if not has_matrix_units():
    pytest.skip("this CPU has no matrix units", allow_module_level=True)
pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_units")]
LIE = {**LAYOUTS, "gaps everywhere": lambda m, n: torch.randn(2 * m, 2 * n)[::2, ::2]}
# blocks of 32 rows and columns, steps of 32 inner numbers; 768 columns and up to 1,024 inner numbers at a time
SHAPES = (
    (1, 1, 1),
    (32, 32, 32),
    (33, 31, 65),
    (7, 200, 33),
    (100, 1100, 48),
    (40, 64, 800),
    (3, 5, 17),
    (300, 48, 96),
)
# of |a| |b|: a float32 is rounded by 6e-8, and so are sums; products of bfloat16 are exact
ERROR = 4e-7


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def check(found: Tensor, a: Tensor, b: Tensor, before: Tensor | None = None) -> None:
    right = a.double() @ b.double() + (0 if before is None else before.double())
    scale = a.double().abs() @ b.double().abs() + (0 if before is None else before.double().abs())
    assert found.dtype == torch.float32 and found.shape == right.shape and found.is_contiguous()
    assert ((found.double() - right).abs() <= ERROR * scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each(a_lies=LIE, b_lies=LIE)
def test_any_shape_and_layout(a_lies: str, b_lies: str, dtype: torch.dtype) -> None:
    for m, k, n in SHAPES:
        a, b, to = LIE[a_lies](m, k).to(dtype), LIE[b_lies](k, n).to(dtype), torch.randn(m, n)
        check(product(a, b), a, b)
        before = to.clone()
        assert product(a, b, to=to) is to
        check(to, a, b, before)


def test_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0], [0.5, -3.0]]), torch.tensor([[1.0, 0.0, 4.0], [2.0, -1.0, 0.25]])
    assert product(a, b).tolist() == [[5.0, -2.0, 4.5], [-5.5, 3.0, 1.25]]
    assert product(a.bfloat16(), b.bfloat16()).tolist() == [[5.0, -2.0, 4.5], [-5.5, 3.0, 1.25]]


def test_every_bit_of_a_number_counts() -> None:
    """A number is the sum of its three pieces, to the last of its 24 bits, from either side."""
    numbers = torch.randn(64, 96) * 10.0 ** torch.linspace(-25, 25, 96)
    numbers[0, :4] = torch.tensor([1 + 2.0**-23, -1 - 2.0**-23, 16_777_215.0, 1 / 3])
    assert torch.equal(product(numbers, torch.eye(96)), numbers)
    assert torch.equal(product(torch.eye(64), numbers), numbers)


def test_it_is_no_less_exact_than_float32_arithmetic() -> None:
    """In the mean of many products, beside torch's own; what one product leaves out is not all of one sign."""
    a, b = torch.randn(256, 768), torch.randn(768, 256)
    right, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    errors = [((found.double() - right) / scale) for found in (product(a, b), (a.double() @ b.double()).float(), a @ b)]
    ours, rounded, _ = (error.square().mean().sqrt() for error in errors)
    assert ours < 3e-8 and rounded < ours
    assert errors[0].mean().abs() < 1e-9
    positive = product(a.abs(), b.abs()).double() / (a.abs().double() @ b.abs().double()) - 1
    assert positive.mean().abs() < 5e-8


def test_what_is_not_finite_is_seen() -> None:
    a, b = torch.randn(40, 70), torch.randn(70, 50)
    for value in (torch.nan, torch.inf, -torch.inf, float.fromhex("0x1.fffffep127")):
        bad = a.clone()
        bad[3, 69] = value
        found = product(bad, b)
        assert not found[3].isfinite().any()
        rest = torch.arange(40) != 3
        assert torch.equal(found[rest], product(a, b)[rest])
    for pattern in (0x7FFFFFFF, 0x7F800001, -1):  # NaNs whose bits carry when they are rounded
        bad = a.clone()
        bad.view(torch.int32)[5, 0] = pattern
        assert product(bad, b)[5].isnan().all() and product(b.t(), bad.t())[:, 5].isnan().all()


def test_nothing_around_is_read_or_written() -> None:
    around = torch.full((45, 120), torch.nan)
    a = around[2:42, 7:107]
    a.copy_(torch.randn(40, 100))
    b = torch.full((103, 66), torch.nan)[1:101, 3:60]
    b.copy_(torch.randn(100, 57))
    to = torch.zeros(42, 57)
    product(a, b, to=to[1:41])
    check(to[1:41], a, b)
    assert (to[0] == 0).all() and (to[41] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    matrices = [torch.randn(*shape).to(dtype) for shape in ((300, 1100), (1100, 200), (40, 1100), (1100, 900))]
    pairs = [(matrices[0], matrices[1]), (matrices[1].t(), matrices[0].t()), (matrices[2], matrices[3])]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [product(a, b) for a, b in pairs]
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            assert all(torch.equal(product(a, b), right) for (a, b), right in zip(pairs, alone, strict=True))
    finally:
        torch.set_num_threads(before)


def test_nothing_to_multiply() -> None:
    assert product(torch.ones(3, 0), torch.ones(0, 2)).tolist() == [[0.0, 0.0]] * 3
    assert product(torch.ones(0, 4), torch.ones(4, 2)).shape == (0, 2)
    assert product(torch.ones(2, 4), torch.ones(4, 0)).shape == (2, 0)
    kept = torch.ones(3, 2)
    assert product(torch.ones(3, 0), torch.ones(0, 2), to=kept).tolist() == [[1.0, 1.0]] * 3
