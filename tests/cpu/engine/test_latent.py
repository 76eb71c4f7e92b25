"""What latent attention and its routers need of vLLM on a CPU: each fails where the patch is no longer needed."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hybridflow.architecture.mixers.latent import DERIVED
from hybridflow.cpu.engine import patches
from hybridflow.rollout.loader import AliasLoader, _set_latent_norms


def replaced(patch: Any, owner: type, name: str) -> tuple[Any, Any]:
    """(vLLM's method, ours)."""
    theirs = vars(owner)[name]
    found: dict[str, Any] = {}
    with mock.patch.object(patches, "replace_in", lambda target, **methods: found.update(methods)):
        patch()
    return theirs, found[name]


@pytest.fixture
def rotary() -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
        return get_rope(64, max_position=32, rope_parameters=parameters, is_neox_style=False, dtype=torch.float32)


def test_queries_of_three_dimensions_are_turned_as_torch_turns_them(rotary: Any) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    theirs, ours = replaced(patches._turn_heads_of_latent_attention, RotaryEmbedding, "forward_cpu")
    positions, query, key = torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 1, 64)
    expected, _ = rotary.forward_native(positions, query.clone(), key.clone())
    assert torch.equal(ours(rotary, positions, query.clone(), key.clone())[0], expected)
    if theirs.__module__.startswith("vllm"):  # else an engine of this process has patched it
        wrong = theirs(rotary, positions, query.clone(), key.clone())[0]
        assert (wrong - expected).abs().max() > 0.1, "vLLM turns them rightly by now: the patch may go"
    flat, flat_key = query.flatten(1), key.flatten(1)
    turned = ours(rotary, positions, flat.clone(), flat_key.clone())[0]
    torch.testing.assert_close(turned.view(5, 4, 64), expected)


def test_a_router_with_float32_logits_computes_them_in_float32() -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    _, ours = replaced(patches._route_in_float32, GateLinear, "forward")
    weight, tokens = torch.randn(8, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    gate = SimpleNamespace(out_dtype=torch.float32, weight=weight, bias=None, return_bias=True)
    logits, bias = ours(gate, tokens)
    assert bias is None and torch.equal(logits, tokens.float() @ weight.float().t())
    assert not torch.equal(logits, (tokens @ weight.t()).float()), "rounding shows"


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon = 1e-5


def test_norms_within_latent_attention_have_transformers_eps() -> None:
    model = nn.ModuleDict({"self_attn": nn.ModuleDict({"q_a_layernorm": Norm(), "kv_a_layernorm": Norm()})})
    model["input_layernorm"] = Norm()
    _set_latent_norms(model)
    eps = {name: module.variance_epsilon for name, module in model.named_modules() if isinstance(module, Norm)}
    assert eps == {"self_attn.q_a_layernorm": 1e-6, "self_attn.kv_a_layernorm": 1e-6, "input_layernorm": 1e-5}


def test_the_loader_leaves_views_of_a_weight_alone() -> None:
    """A copy in their place would not follow the weight."""
    weight = torch.randn(6, 4)
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.empty(6, 4, device="meta"), requires_grad=False))
    for name in DERIVED:
        model.register_parameter(name, nn.Parameter(weight[2:].t(), requires_grad=False))
    loader, asked = AliasLoader.__new__(AliasLoader), list[str]()

    def source(name: str) -> Tensor:
        asked.append(name)
        return weight

    loader._source = source
    loader.load_weights(model, None)
    assert asked == [".weight"]
    weight.mul_(2)
    for name in DERIVED:
        assert torch.equal(model.get_parameter(name), weight[2:].t())
