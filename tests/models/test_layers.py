"""RMSNorm and SwiGLU against their equations in float64: values and gradients; bfloat16 against transformers."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import metrics
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hybridflow.models.layer_classes import IN_C, ON_GPUS, LayerClasses
from tests.launch import ROOT

BOTH = [
    pytest.param(LayerClasses(), id="torch"),
    pytest.param(IN_C, id="in C", marks=pytest.mark.compiles),
    pytest.param(ON_GPUS, id="compiled by torch", marks=pytest.mark.compiles),
]


@pytest.fixture(params=BOTH)
def classes(request: pytest.FixtureRequest) -> LayerClasses:
    if request.param is IN_C:
        request.getfixturevalue("needs_kernels")
    return request.param


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    return [x.double() for x in torch.autograd.grad(output, inputs, grad.to(output.dtype))]


def test_rms_norm_literal(classes: LayerClasses):
    """mean(3^2, 4^2) = 12.5 and eps 12.5 make r = 1/5."""
    out = classes.rms_norm.function.apply(torch.tensor([[3.0, 4.0]]), torch.tensor([10.0, 100.0]), 12.5)
    assert out.tolist() == [[pytest.approx(6.0), pytest.approx(80.0)]]


@pytest.mark.parametrize("shape", [(7, 1, 32), (32,), (2, 3, 32)])
def test_rms_norm_equals_its_equation(classes: LayerClasses, shape):
    x, w, grad = draw(*shape), draw(32, seed=1), draw(*shape, seed=2)
    found = [t.clone().requires_grad_() for t in (x, w)]
    exact = [t.double().requires_grad_() for t in (x, w)]
    out = classes.rms_norm.function.apply(*found, 1e-5)
    expected = exact[1] * exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(out.double(), expected, atol=1e-5)
    for one, other in zip(gradients(out, found, grad), gradients(expected, exact, grad), strict=True):
        assert torch.allclose(one, other, atol=2e-5)


def test_rms_norm_in_bfloat16_is_what_transformers_computes(classes: LayerClasses):
    x, w, grad = (t.bfloat16() for t in (draw(9, 64), draw(64, seed=1), draw(9, 64, seed=2)))
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=True)
    ours, theirs = classes.rms_norm(config, 64, eps=1e-6), LlamaRMSNorm(64, eps=1e-6).bfloat16()
    for module in (ours, theirs):
        module.weight.data.copy_(w)
    assert ours.weight.sequence_parallel
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, expected = ours(inputs[0]), theirs(inputs[1])
    assert (out.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()
    pairs = zip(
        gradients(out, [inputs[0], ours.weight], grad),
        gradients(expected, [inputs[1], theirs.weight], grad),
        strict=True,
    )
    for one, other in pairs:
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()


def test_swiglu_equals_its_equation(classes: LayerClasses):
    x, grad = draw(6, 1, 20), draw(6, 1, 10, seed=1)
    found, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    out = classes.swiglu(None)(found)
    gate, up = exact.chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    assert torch.allclose(out.double(), expected, atol=1e-6)
    assert torch.allclose(gradients(out, [found], grad)[0], gradients(expected, [exact], grad)[0], atol=1e-6)


def test_swiglu_literal(classes: LayerClasses):
    """silu(0) = 0 with slope 1/2: only the gate gets a gradient, half of grad x up."""
    x = torch.tensor([[0.0, 6.0]], requires_grad=True)
    out = classes.swiglu(None)(x)
    (grad,) = torch.autograd.grad(out, x, torch.tensor([[4.0]]))
    assert out.tolist() == [[0.0]] and grad.tolist() == [[12.0, 0.0]]


def check_swiglu_on_gpus(dtype: torch.dtype) -> None:
    """As torch compiles it here, for a CPU; with rows that differ it is compiled a second time, for any number."""
    torch._dynamo.reset()
    kernels = []
    for rows in (6, 11, 17):
        x, grad = draw(rows, 40, seed=rows).to(dtype), draw(rows, 20, seed=1).to(dtype)
        found, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        metrics.reset()
        out = ON_GPUS.swiglu.function.apply(found)
        forward = metrics.generated_kernel_count
        [mine] = gradients(out, [found], grad)
        kernels.append((forward, metrics.generated_kernel_count - forward))
        gate, up = exact.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up
        near = 1e-6 if dtype == torch.float32 else 2**-8
        torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)
        torch.testing.assert_close(mine, gradients(expected, [exact], grad)[0], rtol=near, atol=near)
    assert kernels == [(1, 1), (1, 1), (0, 0)]


@pytest.mark.compiles
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swiglu_on_gpus_is_one_kernel_each_way(dtype: str) -> None:
    """In a process of its own that inherits nothing: on CPUs hybridflow turns megatron's compiled functions off when it
    adapts megatron, and says so in the environment.
    """
    code = f"import torch; from tests.models.test_layers import check_swiglu_on_gpus as check; check(torch.{dtype})"
    off = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    env = {name: value for name, value in os.environ.items() if name not in off}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
