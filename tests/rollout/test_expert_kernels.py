"""What is told of the engine's experts, by vLLM's own choice on a simulated Hopper and Blackwell."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from hybridflow.rollout.expert_kernels import expert_note

TAKEN = "the engine computes experts by TRITON, on the weights that are trained"
UNTUNED = (
    ". vLLM has no tuned tiles for 16 experts of 40 on this device: VLLM_TUNED_CONFIG_FOLDER takes those that vLLM's "
    "benchmark_moe.py finds"
)


def mixture(num_experts: int, size: int) -> nn.Module:
    """A layer of experts as vLLM makes it beside a trainer on a GPU, without a kernel."""
    method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    method.unquantized_backend = UnquantizedMoeBackend.TRITON
    method.moe = FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=size,
        num_local_experts=num_experts,
        num_logical_experts=num_experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        moe_backend="triton",
    )
    layer = nn.Module()
    layer.quant_method = method
    layer.w2_weight = nn.Parameter(torch.empty(num_experts, 64, size, device="meta"))
    return nn.Sequential(nn.Linear(1, 1), layer)


@pytest.fixture(params=[90, 100])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    gpu = SimpleNamespace(
        is_device_capability_family=lambda family: family == request.param,
        **dict.fromkeys(("is_tpu", "is_out_of_tree", "is_rocm", "is_xpu", "is_cpu"), lambda: False),
        is_cuda=lambda: True,
    )
    fits = SimpleNamespace(is_supported_config=lambda *_: (True, None))
    monkeypatch.setattr(unquantized, "current_platform", gpu)
    monkeypatch.setattr(unquantized, "backend_to_kernel_cls", lambda backend: [fits])
    monkeypatch.setattr(fused_moe, "get_device_name_as_file_name", lambda: "NVIDIA_H100_80GB_HBM3")
    return request.param


def test_the_note_says_what_vllm_alone_would_take(family: int) -> None:
    """On Hopper that is Triton, too."""
    theirs = ". vLLM alone would take FlashInfer TRTLLM, which reorders weights and needs a copy of them"
    assert expert_note(mixture(16, 40)) == TAKEN + (theirs if family == 100 else "") + UNTUNED


def test_tuned_tiles_are_found_where_vllm_looks(family: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == 90:
        assert expert_note(mixture(16, 1344)) == TAKEN  # vLLM has these
    (tmp_path / "E=16,N=40,device_name=NVIDIA_H100_80GB_HBM3.json").write_text("{}")
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    assert UNTUNED not in expert_note(mixture(16, 40))


def test_a_model_without_experts_has_no_note() -> None:
    assert expert_note(nn.Sequential(nn.Linear(1, 1))) is None
