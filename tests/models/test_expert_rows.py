"""Rows by expert: by torch, and by the Triton kernels in Triton's interpreter, in one process of its own.

Both against a loop over copies. A process interprets kernels from its first import of Triton on.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.models import expert_triton, layer_classes
from hybridflow.models.expert_rows import ExpertKernels, KernelsByTorch, rows_of, sums_of
from hybridflow.models.expert_triton import KernelsByTriton
from hybridflow.models.layers import SwiGLUFunction

ROOT = Path(__file__).resolve().parents[2]
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
BY_TRITON = "interpreted"
BFLOAT16 = 2**-6 if INTERPRETS else 2**-7  # the interpreter cuts off where a GPU rounds to the nearest
HERE = {"all of them": (9, 0), "a run": (3, 4), "a run that nobody chose": (2, 20), "one": (1, 5)}  # held, the first


@pytest.fixture(params=[BY_TRITON if INTERPRETS else "by torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ExpertKernels:
    if request.param == "by torch":
        return KernelsByTorch(SwiGLUFunction)
    monkeypatch.setattr(expert_triton, "COPIES", 16)  # several blocks
    monkeypatch.setattr(expert_triton, "COLUMNS", 16)
    return KernelsByTriton()


def choices(num_tokens: int, k: int, num_experts: int = 9) -> Tensor:
    """(t, k) different numbers."""
    draws = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(3))
    return draws.topk(k).indices


def expected_order(experts: Tensor, held: int) -> list[list[int]]:
    """By expert the copies, in their order."""
    return [[c for c, number in enumerate(experts.flatten().tolist()) if number == expert] for expert in range(held)]


@pytest.mark.parametrize("here", HERE)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_copies_stand_by_expert_in_the_order_of_tokens(kernels: ExpertKernels, here: str, num_tokens: int) -> None:
    held, first = HERE[here]
    experts = choices(num_tokens, 4) - first
    order = kernels.order(experts, held, None)
    expected = expected_order(experts, held)
    assert order.ends.dtype == torch.int32
    assert order.ends.diff(prepend=order.ends.new_zeros(1)).tolist() == [len(copies) for copies in expected]
    count = int(order.ends[-1])
    assert order.copies[:count].tolist() == [copy for copies in expected for copy in copies]
    if order.positions is not None:
        places = {copy: row for row, copy in enumerate(order.copies[:count].tolist())}
        assert order.positions.flatten().tolist() == [places.get(copy, -1) for copy in range(experts.numel())]
    known = kernels.order(experts, held, count)
    assert len(known.copies) == count and torch.equal(known.copies, order.copies[:count])


@pytest.mark.parametrize("here", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [8, 40])
def test_rows_and_sums_equal_a_loop_over_copies(
    kernels: ExpertKernels, here: str, dtype: torch.dtype, columns: int
) -> None:
    """And each is the other's gradient."""
    (held, first), generator = HERE[here], torch.Generator().manual_seed(1)
    experts = choices(23, 3) - first
    tokens = torch.randn(23, columns, generator=generator).to(dtype).requires_grad_()
    order = kernels.order(experts, held, None)
    count = int(order.ends[-1])
    copies = [copy for some in expected_order(experts, held) for copy in some]
    rows = rows_of(tokens, order, kernels)
    assert torch.equal(rows[:count], tokens[[copy // 3 for copy in copies]])
    by_row = torch.randn(rows.shape, generator=generator).to(dtype).requires_grad_()
    sums = sums_of(by_row, order, kernels)
    expected = torch.zeros(23, columns)
    for copy, row in sorted(zip(copies, by_row, strict=False), key=lambda pair: pair[0]):
        expected[copy // 3] += row.detach().float()
    exact = {"rtol": 0.0, "atol": 0.0} if dtype == torch.float32 else {"rtol": BFLOAT16, "atol": BFLOAT16}
    torch.testing.assert_close(sums.float(), expected, **exact)
    (of_tokens,) = torch.autograd.grad(rows, tokens, by_row.detach())
    assert torch.equal(of_tokens, sums)
    weights = torch.randn(23, columns, generator=generator).to(dtype)
    (of_rows,) = torch.autograd.grad(sums, by_row, weights)
    assert torch.equal(of_rows[:count], weights[[copy // 3 for copy in copies]])


@pytest.mark.parametrize("here", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [8, 40])
def test_the_activation_has_shares_in_it(kernels: ExpertKernels, here: str, dtype: torch.dtype, size: int) -> None:
    """Values, and gradients of [gate; up] and shares, against torch in float64."""
    (held, first), generator = HERE[here], torch.Generator().manual_seed(2)
    experts = choices(11, 3) - first
    order = kernels.order(experts, held, None)
    count, copies = int(order.ends[-1]), order.copies
    x = (2 * torch.randn(len(copies), 2 * size, generator=generator)).to(dtype).requires_grad_()
    shares = torch.rand(11, 3, generator=generator).requires_grad_()
    y = kernels.activated(x, shares, order)
    assert y.dtype == dtype
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    grad[count:] = 0  # what stands there is nobody's
    grads = torch.autograd.grad(y, (x, shares), grad)
    exact_x, exact_shares = (each.detach().double().requires_grad_() for each in (x, shares))
    gate, up = exact_x[:count].chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up * exact_shares.flatten()[copies[:count].long(), None]
    exact_grads = torch.autograd.grad(exact, (exact_x, exact_shares), grad[:count].double())
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4 * BFLOAT16, "atol": 4 * BFLOAT16}
    torch.testing.assert_close(y[:count].double(), exact, **near)
    torch.testing.assert_close(grads[0][:count].double(), exact_grads[0][:count], **near)
    near["atol"] *= size**0.5  # a sum of so many products
    torch.testing.assert_close(grads[1].double(), exact_grads[1], **near)


def test_the_same_inputs_give_the_same_bits(kernels: ExpertKernels) -> None:
    def once() -> list[Tensor]:
        tokens = torch.randn(37, 24, generator=torch.Generator().manual_seed(5)).requires_grad_()
        shares = torch.rand(37, 4, generator=torch.Generator().manual_seed(6)).requires_grad_()
        order = kernels.order(choices(37, 4), 9, None)
        sums = sums_of(kernels.activated(rows_of(tokens, order, kernels), shares, order), order, kernels)
        return [sums, *torch.autograd.grad(sums.square().sum(), (tokens, shares))]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


# ------------------------------------------------------------------------------------------ Triton's kernels

needs_triton = pytest.mark.skipif(not expert_triton.HAS_TRITON, reason="triton is not installed")


@pytest.mark.thorough
@needs_triton
@pytest.mark.skipif(INTERPRETS, reason="this is that process")
@pytest.mark.distributed
def test_the_triton_kernels_pass_these_tests_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-k", BY_TRITON]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\n45 passed", done.stdout) and "skipped" not in done.stdout, done.stdout


def test_a_gpu_takes_the_triton_kernels_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads a size back only where rows are kept that others have some of."""
    monkeypatch.setattr(layer_classes, "uses_cuda", lambda: True)
    monkeypatch.setattr(layer_classes, "HAS_TRITON", True)
    assert isinstance(layer_classes.expert_kernels(kept=True), KernelsByTriton)
    monkeypatch.setattr(layer_classes, "HAS_TRITON", False)
    assert isinstance(layer_classes.expert_kernels(kept=True), KernelsByTorch)
    monkeypatch.setattr(layer_classes, "uses_cuda", lambda: False)
    monkeypatch.setattr(layer_classes, "HAS_TRITON", True)
    assert isinstance(layer_classes.expert_kernels(kept=True), KernelsByTorch)


@needs_triton
@pytest.mark.skipif(INTERPRETS, reason="compiled code is not interpreted")
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_the_kernels_compile_for_an_h100_to_wide_accesses_and_no_atomics(element: str) -> None:
    """There need be none. A row's bytes are read and written 16 at a time, but for what is 8 a thread and narrower."""
    from tests.reshard.test_kernel import compiled

    value, columns = f"*{element}", {"COLUMNS": 1024}
    wide = {"bf16": 1, "fp32": 2}[element]  # 1,024 values of 4 warps: 8 a thread
    rows = dict(tokens=value, copies="*i32", num_rows="*i32", rows=value, k="i32", columns="i32")
    sums = dict(rows=value, positions="*i32", sums=value, k="i32", columns="i32")
    swiglu = dict(x=value, shares="*fp32", copies="*i32", num_rows="*i32", y=value, columns="i32")
    backward = dict(grad=value, x=value, shares="*fp32", copies="*i32", num_rows="*i32", grad_x=value)
    backward |= dict(grad_shares="*fp32", columns="i32")
    for kernel, arguments, loads, stores in (
        (expert_triton.rows_kernel, rows, wide, wide),
        (expert_triton.sums_kernel, sums, wide, wide),
        (expert_triton.swiglu_kernel, swiglu, 2 * wide, wide),
        (expert_triton.swiglu_backward_kernel, backward, 3 * wide, 2 * wide),
    ):
        aligned = tuple(name for name in arguments if name not in ("k", "num_rows"))
        made = compiled(kernel, arguments, columns, multiples_of_16=aligned, warps=expert_triton.WARPS).asm["ptx"]
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", made)) == loads, made
        assert len(re.findall(r"st\.global\S*\.v4\.b32", made)) == stores, made
        assert "atom" not in made and "red.global" not in made


@needs_triton
@pytest.mark.skipif(INTERPRETS, reason="compiled code is not interpreted")
def test_the_kernels_that_count_compile_for_an_h100(tmp_path: Path) -> None:
    """Of 512 experts without spills."""
    from tests.reshard.test_kernel import compiled, has_tool, resources

    sizes = dict(num_copies="i32", num_experts="i32", blocks="i32")
    constants = {"COPIES": expert_triton.COPIES, "EXPERTS": 512}
    counts = dict(numbers="*i64", counts="*i32", **sizes)
    places = dict(numbers="*i64", begins="*i32", positions="*i32", order="*i32", **sizes)
    for kernel, arguments in ((expert_triton.counts_kernel, counts), (expert_triton.places_kernel, places)):
        built = compiled(kernel, arguments, constants, multiples_of_16=(), warps=expert_triton.COUNTING_WARPS)
        assert "atom" not in built.asm["ptx"] and "red.global" not in built.asm["ptx"]
        if has_tool("cuobjdump"):
            used = resources(built.asm["cubin"], tmp_path)
            assert used["LOCAL"] == used["STACK"] == 0, used
