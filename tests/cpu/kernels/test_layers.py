"""The kernels in C against their equations in float64, forward and backward, for both widths of vectors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.attention import rotated
from hybridflow.cpu.kernels import layers
from hybridflow.cpu.layers import RMSNormFunctionInC, SumAndNormFunction, SwiGLUFunctionInC
from tests.grids import each

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_kernels")]

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}  # relative to the largest value; bfloat16 rounds twice
EPS = 1e-5
# a block has 64 rows, a vector 16 or 8 columns
ROWS, COLUMNS = (1, 63, 64, 65, 200), (2, 5, 16, 17, 64, 100, 256)


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outputs_and_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    weight = drawn(*out.shape, seed=7, dtype=tensors[0].dtype if tensors[0].dtype in TOLERANCES else torch.float32)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype))]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return RMSNormFunctionInC.apply(x, weight, EPS)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def exact_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def compare(ours: Callable[..., Tensor], exact: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    dtype = tensors[0].dtype
    mine, expected = outputs_and_gradients(ours, tensors), outputs_and_gradients(exact, [x.double() for x in tensors])
    for own, right in zip(mine, expected, strict=True):
        assert own.dtype == dtype and own.shape == right.shape
        assert (own.double() - right).abs().max() <= TOLERANCES[dtype] * max(1.0, float(right.abs().max()))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=ROWS, columns=COLUMNS)
def test_rms_norm_equals_its_equation(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, columns, seed=rows, dtype=dtype), drawn(columns, seed=columns, dtype=dtype)
    compare(norm, exact_norm, [x, weight])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=ROWS, columns=COLUMNS)
def test_a_sum_and_its_norm_are_the_bits_of_one_after_the_other(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, total = (drawn(rows, columns, seed=seed, dtype=dtype) for seed in (1, 2))
    weight, expected = drawn(columns, seed=3, dtype=dtype), x + total
    y = layers.add_rms_norm(x, total, weight, EPS)
    assert torch.equal(total, expected)
    assert torch.equal(y, layers.rms_norm(expected, weight, EPS)[0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=ROWS, columns=COLUMNS)
def test_of_a_sum_and_its_norm_both_go_on(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Forward the bits of one after the other; the gradients are those of the sum's two uses."""
    x, residual = (drawn(rows, columns, seed=seed, dtype=dtype) for seed in (1, 2))
    weight, factors = drawn(columns, seed=3, dtype=dtype), drawn(columns, seed=4, dtype=dtype)
    total, y = SumAndNormFunction.apply(x, residual, weight, EPS)
    assert torch.equal(total, x + residual) and torch.equal(y, layers.rms_norm(total, weight, EPS)[0])

    def ours(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        total, y = SumAndNormFunction.apply(x, residual, weight, EPS)
        return y + factors * total

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return exact_norm(x + residual, weight) + factors.to(x.dtype) * (x + residual)

    compare(ours, exact, [x, residual, weight])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(columns=COLUMNS)
def test_the_gradient_of_swiglu_takes_the_memory_of_what_is_nobodys(columns: int, dtype: torch.dtype) -> None:
    """The same bits; autograd refuses what would read the memory again, and a leaf stays as it is."""
    x, weight = (drawn(65, 2 * columns, seed=seed, dtype=dtype).requires_grad_() for seed in (1, 2))
    before, grad = x.detach().clone(), drawn(65, columns, seed=3, dtype=dtype)
    (expected,) = torch.autograd.grad(SwiGLUFunctionInC.apply(x), x, grad)
    assert torch.equal(x, before)
    both = x + 0
    (found,) = torch.autograd.grad(out := SwiGLUFunctionInC.apply(both), x, grad, retain_graph=True)
    assert torch.equal(found, expected) and torch.equal(both, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, x, grad)
    both = x + 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad([both * weight, SwiGLUFunctionInC.apply(both)], [x, weight], [before, grad])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(rows=ROWS, columns=COLUMNS)
def test_swiglu_equals_its_equation(rows: int, columns: int, dtype: torch.dtype) -> None:
    compare(SwiGLUFunctionInC.apply, exact_swiglu, [3.0 * drawn(rows, 2 * columns, seed=rows, dtype=dtype)])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@each(tokens=(1, 65), head=((64, 32), (24, 12), (10, 5), (80, 24), (128, 64), (6, 2)))
def test_rotary_embedding_turns_complex_numbers(tokens: int, head: tuple[int, int], dtype: torch.dtype) -> None:
    """Of heads that are a part of a projection; what lies beyond stays, bit for bit. Backward: turned back."""
    dims, turning = head
    x = drawn(tokens, 7, dims, seed=dims, dtype=dtype)[:, 2:5]
    angles = drawn(tokens, turning, seed=1, dtype=torch.float64)
    cos, sin = (table[:, None].to(dtype) for table in (angles.cos(), angles.sin()))

    def turned(x: Tensor, by: Tensor) -> Tensor:
        found = torch.complex(x[..., :turning], x[..., turning : 2 * turning]) * by
        return torch.cat([found.real, found.imag, x[..., 2 * turning :]], -1)

    by = torch.complex(cos.double(), sin.double())
    leaf, grad = x.detach().requires_grad_(), drawn(tokens, 3, dims, seed=2, dtype=dtype)
    out = rotated(leaf, cos, sin)
    (of_x,) = torch.autograd.grad(out, leaf, grad)
    for found, whole, angle in ((out, x, by), (of_x, grad, by.conj())):
        right = turned(whole.double(), angle)
        assert found.dtype == dtype and torch.equal(found[..., 2 * turning :], whole[..., 2 * turning :])
        assert (found.double() - right).abs().max() <= TOLERANCES[dtype] / 2 * right.abs().max()


@pytest.mark.usefixtures("kernels")
def test_swiglu_by_hand_far_from_zero() -> None:
    """The gate is open, or shut; log 3 opens it by 3/4, where the slope is 3/4 + log(3) 3/16."""
    x = torch.tensor([[100.0, -100.0, 1.0986122886681098, 2.0, 3.0, 4.0]], requires_grad=True)
    out = SwiGLUFunctionInC.apply(x)
    torch.testing.assert_close(out, torch.tensor([[200.0, 0.0, 3 * 1.0986122886681098]]))
    (grad,) = torch.autograd.grad(out.sum(), x)
    slope = 0.75 + 1.0986122886681098 * 3 / 16
    torch.testing.assert_close(grad, torch.tensor([[2.0, 0.0, 4 * slope, 100.0, 0.0, 0.75 * 1.0986122886681098]]))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float, dtype: torch.dtype) -> None:
    x, weight = drawn(70, 32, seed=0, dtype=dtype), drawn(32, seed=1, dtype=dtype)
    x[3, 7] = bad
    for ours, tensors in ((norm, [x, weight]), (SwiGLUFunctionInC.apply, [x])):
        out, grad, *_ = outputs_and_gradients(ours, tensors)
        for found in (out, grad):
            assert found.isfinite().all(1).logical_not().nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    threads, x, weight = torch.get_num_threads(), drawn(1000, 48, seed=0, dtype=dtype), drawn(48, seed=1, dtype=dtype)
    found = []
    try:
        for count in (1, 3, 8):
            torch.set_num_threads(count)
            found.append(
                [*outputs_and_gradients(norm, [x, weight]), *outputs_and_gradients(SwiGLUFunctionInC.apply, [x])]
            )
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_no_rows_and_rows_that_do_not_lie_together() -> None:
    """An expert that no token goes to; heads that are a part of a projection."""
    empty, weight = torch.empty(0, 8), torch.ones(8)
    assert [x.shape for x in outputs_and_gradients(norm, [empty, weight])] == [(0, 8), (0, 8), (8,)]
    assert outputs_and_gradients(norm, [empty, weight])[2].tolist() == [0.0] * 8
    assert [x.shape for x in outputs_and_gradients(SwiGLUFunctionInC.apply, [empty])] == [(0, 4), (0, 8)]
    whole = drawn(9, 3, 8, seed=0, dtype=torch.float32)
    part = whole[:, 1:2]
    assert not part.is_contiguous()
    for apart, together in zip(
        outputs_and_gradients(norm, [part, weight]),
        outputs_and_gradients(norm, [part.contiguous(), weight]),
        strict=True,
    ):
        assert torch.equal(apart, together)


def test_the_backward_pass_takes_what_torchs_forward_pass_keeps() -> None:
    """1 / sqrt(mean(x^2) + eps) of each row."""
    x, weight, grad = (drawn(20, 16, seed=i, dtype=torch.float32) for i in range(3))
    _, r = layers.rms_norm(x, weight[0], EPS)
    expected = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    torch.testing.assert_close(r, expected)
    of_x, of_weight = layers.rms_norm_backward(grad, x, weight[0], expected)
    n = x * expected
    torch.testing.assert_close(of_weight, (grad * n).sum(0))
    torch.testing.assert_close(of_x, expected * (weight[0] * grad - n * (weight[0] * grad * n).mean(-1, keepdim=True)))
