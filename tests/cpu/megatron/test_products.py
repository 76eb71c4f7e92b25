"""Products by oneDNN against float64, however the matrices lie, and who gets to it or to the matrix units."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.megatron import products
from hybridflow.cpu.megatron.products import WORTH_A_COPY, WORTH_IT, WORTH_TILES, product, way_of
from tests.cpu.kernels.modes import has_matrix_units

Make = Callable[[int, int], Tensor]
LAYOUTS: dict[str, Make] = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).t(),
    "rows with gaps": lambda m, n: torch.randn(m, n + 24)[:, 8 : 8 + n],
    "columns with gaps": lambda m, n: torch.randn(n + 3, m + 5)[:n, 5:].t(),
}


@pytest.mark.parametrize("a_lies", LAYOUTS)
@pytest.mark.parametrize("b_lies", LAYOUTS)
@pytest.mark.parametrize("shape", [(300, 48, 96), (96, 300, 48), (7, 200, 33), (1, 64, 64)])
def test_any_layout(shape: tuple[int, int, int], a_lies: str, b_lies: str) -> None:
    torch.manual_seed(0)
    m, k, n = shape
    a, b, bias = LAYOUTS[a_lies](m, k), LAYOUTS[b_lies](k, n), torch.randn(n)
    expected = a.double() @ b.double()
    found = product(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(product(a, b, bias).double(), expected + bias, rtol=0, atol=1e-4)


@pytest.mark.parametrize("a_lies", LAYOUTS)
@pytest.mark.parametrize("b_lies", LAYOUTS)
def test_onednn_never_sees_gaps(a_lies: str, b_lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel for them is the one that others are checked against: seconds a product."""
    seen: list[tuple[Tensor, Tensor]] = []
    linear = products._linear

    def seeing(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((x, weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(products, "_linear", seeing)
    product(LAYOUTS[a_lies](300, 48), LAYOUTS[b_lies](48, 96))
    ((x, weight),) = seen
    assert x.is_contiguous()
    assert weight.is_contiguous() or weight.t().is_contiguous()


@pytest.mark.parametrize(
    ("m", "k", "n", "lies", "dtype", "one_dnn", "units"),
    [
        (WORTH_IT // 64 // 64, 64, 64, "rows", torch.float32, True, True),
        (WORTH_IT // 64 // 64 - 1, 64, 64, "rows", torch.float32, False, False),
        (WORTH_A_COPY, 256, WORTH_IT, "columns with gaps", torch.float32, True, True),
        (WORTH_A_COPY - 1, 256, WORTH_IT, "columns with gaps", torch.float32, False, False),
        (WORTH_A_COPY - 1, 256, WORTH_IT, "columns", torch.float32, True, False),
        (WORTH_TILES, 256, WORTH_IT, "columns", torch.float32, True, True),
        (WORTH_IT, WORTH_TILES - 1, 64, "rows", torch.float32, True, False),
        (WORTH_IT, 64, WORTH_TILES - 1, "rows", torch.float32, True, False),
        (WORTH_IT, 64, 64, "rows", torch.bfloat16, False, False),
        (WORTH_IT, 64, 64, "rows", torch.float64, False, False),
    ],
)
def test_what_is_left_to_torch(
    m: int, k: int, n: int, lies: str, dtype: torch.dtype, one_dnn: bool, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        a, b = (x.to(dtype) for x in (LAYOUTS["rows"](m, k), LAYOUTS[lies](k, n)))
    for has_units, slow, expected in (
        (True, False, products.by_units if units else None),
        (True, True, products.by_units if units else None),
        (False, True, product if one_dnn else None),
        (False, False, None),
    ):
        monkeypatch.setattr(products, "has_units", lambda has=has_units: has)
        monkeypatch.setattr(products, "mkl_is_slow", lambda slow=slow: slow)
        assert way_of(a, b) is expected, (has_units, slow)


@pytest.mark.parametrize(
    ("cpu", "intel", "expected"), [("AVX512", False, True), ("AVX512", True, False), ("AVX2", False, False)]
)
def test_where_it_is_used(cpu: str, intel: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    monkeypatch.setattr(products, "_is_intel", lambda: intel)
    products.mkl_is_slow.cache_clear()
    found = products.mkl_is_slow()
    products.mkl_is_slow.cache_clear()
    assert found is expected


WHOLE_PROCESS = """
import torch
from hybridflow.cpu.megatron import products
products.mkl_is_slow = lambda: WAY == "product"
products.has_units = lambda: WAY == "by_units" and products.matrix.has_units()
assert products.use_fast_products() and products.use_fast_products()
calls = []
way = getattr(products, WAY)
setattr(products, WAY, lambda *tensors: (calls.append([tuple(x.shape) for x in tensors[:2]]), way(*tensors))[1])

def run(dtype, tokens, bias):
    torch.manual_seed(0)
    shapes = (tokens, 3, 64), (96, 64), (tokens, 3, 96)
    x, weight, grad = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    inputs = [t.to(dtype).requires_grad_() for t in (x, weight, torch.arange(96.0))]
    y = torch.nn.functional.linear(inputs[0], inputs[1], inputs[2] if bias else None)
    return [y, *torch.autograd.grad(y, inputs[: 2 + bias], grad.to(dtype))]

for tokens, fast in ((1000, True), (10, False)):
    for bias in (False, True):
        calls.clear()
        for found, expected in zip(run(torch.float32, tokens, bias), run(torch.float64, tokens, bias)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
        assert len(calls) == 3 * fast, (tokens, bias, calls)  # output, gradient of the input, of the weight
for beta, alpha in ((0, 1), (1, 2)):
    a, b, c = torch.randn(500, 80), torch.randn(80, 60), torch.randn(60)
    expected = beta * c.double() + alpha * (a.double() @ b.double())
    torch.testing.assert_close(torch.addmm(c, a, b, beta=beta, alpha=alpha).double(), expected, rtol=0, atol=1e-3)
with torch.inference_mode():
    torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), rtol=0, atol=1e-4)
print("the same")
"""


@pytest.mark.compiles
@pytest.mark.parametrize("way", ["product", *(["by_units"] if has_matrix_units() else [])])
def test_forward_and_backward_of_a_whole_process(way: str) -> None:
    """Every product of a linear layer goes there, with and without a bias; what torch alone can do still does."""
    done = subprocess.run(
        [sys.executable, "-c", f"WAY = {way!r}\n{WHOLE_PROCESS}"], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the same\n", "")
