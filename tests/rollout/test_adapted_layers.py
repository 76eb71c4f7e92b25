"""Adapters in vLLM's linear layers: the equation, compiled code that reads them anew, layers that can have none."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridflow.errors import EnvironmentProblem
from hybridflow.rollout.adapters import EngineAdapters
from hybridflow.rollout.loader import AdaptedLinearMethod, add_adapters
from tests.launch import ROOT

RANK, SCALE, OUTPUTS = 3, 2.0, (8, 4, 4)


class Layer(nn.Module):
    """As vLLM's have them: q, k and v in one weight."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"weight": (sum(OUTPUTS), 6), "lora_a": (3 * RANK, 6), "lora_b": (sum(OUTPUTS), RANK)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.method = method()

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)


def method() -> AdaptedLinearMethod:
    found = AdaptedLinearMethod(RANK, SCALE, OUTPUTS, sums=False)
    found._gemm_impl = lambda layer, x, weight, bias: linear(x, weight, bias)
    return found


def by_hand(layer: Layer, x: Tensor) -> Tensor:
    """q, k and v each by W x + scale B (A x), in float64."""
    weight, a, b, x = (each.double() for each in (layer.weight, layer.lora_a, layer.lora_b, x))
    rows, parts = 0, []
    for i, size in enumerate(OUTPUTS):
        own = slice(rows, rows + size)
        parts.append(x @ weight[own].t() + SCALE * (x @ a[i * RANK : (i + 1) * RANK].t()) @ b[own].t())
        rows += size
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6)])
def test_each_part_has_its_own_adapter(shape: tuple[int, ...]) -> None:
    layer, x = Layer(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(layer(x).double(), by_hand(layer, x), atol=1e-5)


def check_compiled() -> None:
    with torch.inference_mode():
        layer, x = Layer(), torch.randn(5, 6)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x).double(), by_hand(layer, x), atol=1e-5)
        layer.lora_b.data.mul_(-3)  # as an optimizer step changes the trainer's memory
        layer.lora_a.data.add_(1)
        assert torch.allclose(compiled(x).double(), by_hand(layer, x), atol=1e-4)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.thorough
@pytest.mark.compiles
def test_compiled_code_is_one_graph_and_reads_the_adapters_anew() -> None:
    """In a process of its own: hybridflow turns torch's compiler off on CPUs, and says so in the environment."""
    off = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    env = {name: value for name, value in os.environ.items() if name not in off}
    code = "from tests.rollout.test_adapted_layers import check_compiled as check; check()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_layer_that_vllm_computes_in_another_way_is_named() -> None:
    model = nn.Module()
    model.o_proj = nn.Linear(4, 4)
    with pytest.raises(EnvironmentProblem) as raised:
        add_adapters(model, EngineAdapters(2, 1.0, {"o_proj": (1,)}))
    assert str(raised.value) == "o_proj: vLLM computes this layer by Linear, which takes no adapter"
