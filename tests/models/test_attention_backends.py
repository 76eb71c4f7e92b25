"""Which attention a GPU would choose, with a simulated flash attention 3 and a simulated cuDNN of Transformer Engine.

The simulated ones compute on a CPU. What they are asked is what Transformer Engine 2.16.1 takes (fused_attn.py).
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from hybridflow.cpu import attention as cpu_attention
from hybridflow.errors import UserError
from hybridflow.models import attention_backends as backends
from hybridflow.models import layer_specs, mixer_modules
from hybridflow.models.attention import AttentionFunctions, attention_by_length, by_length_or_merged
from hybridflow.models.shared_prompt import AttentionKernel, AttentionSpans
from hybridflow.parallel.layout import Place
from tests.bench.output_layer import SPEC

CPU = torch.device("cpu")
MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
RIGHT = by_length_or_merged(AttentionKernel(cpu_attention.flash_forward, cpu_attention.flash_backward))


class SimulatedCuDNN(ModuleType):
    """Log-sum-exps are (t, heads, 1). change: of what is returned, where it is wrong."""

    FusedAttnBackend = {"F16_arbitrary_seqlen": 1}

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda out, lse: (out, lse)) -> None:
        super().__init__(MODULE)
        self.change, self.masks = change, []

    def fused_attn_fwd(self, is_training: bool, o_format: str, **named: Any) -> tuple[Tensor, list[Tensor]]:
        assert is_training and o_format == "thd" and named["fake_dtype"] == named["q"].dtype
        qkv, scale = [named[name] for name in "qkv"], named["attn_scale"]
        out, lse = self.change(*cpu_attention.flash_forward(*qkv, self._spans(**named), scale))
        return out, [lse.unsqueeze(-1).contiguous(), torch.zeros(2, dtype=torch.int64)]

    def fused_attn_bwd(self, o: Tensor, d_o: Tensor, aux_ctx_tensors: list[Tensor], **named: Any) -> list[Any]:
        (lse, state), qkv = aux_ctx_tensors, [named[name] for name in "qkv"]
        assert lse.shape == (*o.shape[:2], 1) and state.shape == (2,)
        assert named["o_format"] == named["do_format"] == "thd" and named["dqkv_layout"] == "thd_thd_thd"
        spans = self._spans(**named)
        return [*cpu_attention.flash_backward(d_o, *qkv, o, lse[..., 0], spans, named["attn_scale"]), None]

    def _spans(self, **named: Any) -> AttentionSpans:
        assert named["qkv_layout"] == "thd_thd_thd" and named["fused_attention_backend"] == 1
        bounds_q, bounds_k = named["cu_seqlens_q"], named["cu_seqlens_kv"]
        assert named["cu_seqlens_q_padded"] is bounds_q and named["cu_seqlens_kv_padded"] is bounds_k
        causal = {"padding_causal": True, "padding": False}[named["attn_mask_type"]]
        assert named["window_size"] == ((-1, 0) if causal else (-1, -1))
        self.masks.append(named["attn_mask_type"])
        queries, keys = (tuple(bounds.diff().tolist()) for bounds in (bounds_q, bounds_k))
        assert (named["max_seqlen_q"], named["max_seqlen_kv"]) == (max(queries), max(keys))
        return AttentionSpans(queries, keys, bounds_q, bounds_k, causal=causal)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    for function in (backends.why_not_flash3, backends.why_not_fused):
        function.cache_clear()
    yield
    for function in (backends.why_not_flash3, backends.why_not_fused):
        function.cache_clear()


def simulate(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


# ------------------------------------------------------------------------------------------------ cuDNN's


def test_cudnns_attention_is_taken_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = SimulatedCuDNN()
    simulate(monkeypatch, cudnn)
    backends.attend_on_gpus(torch.bfloat16, "fused")
    # packed sequences once, shared prompts with themselves and then with the prompts: forward, and backward
    own, prompts = "padding_causal", "padding"
    assert cudnn.masks == [own, own, own, prompts, own, prompts]
    backends.attend_on_gpus(torch.bfloat16, "fused")
    assert len(cudnn.masks) == 6, "it is tried once"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda out, lse: (out * 1.1, lse), "on packed sequences it differs from float64 by 0.1"),
        (lambda out, lse: (out, lse + 1.0), "on packed sequences it differs from float64 by "),
        (lambda out, lse: (out * float("nan"), lse), "on packed sequences it differs from float64 by nan"),
    ],
)
def test_cudnns_attention_that_is_wrong_is_refused(
    change: Callable[..., Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, SimulatedCuDNN(change))
    with pytest.raises(UserError) as refused:
        backends.attend_on_gpus(torch.bfloat16, "fused")
    assert f"megatron_arguments.attention_backend = fused: takes cuDNN's attention; {problem}" in str(refused.value)


def test_without_transformer_engine_there_is_none() -> None:
    with pytest.raises(UserError, match=r"attention_backend = fused.*Transformer Engine: No module named"):
        backends.attend_on_gpus(torch.bfloat16, "fused")
    backends.attend_on_gpus(torch.float32, "fused")  # has nothing to do with it


def test_a_kernel_that_gives_up_and_one_that_is_wrong_on_shared_prompts_alone() -> None:
    def gives_up(*qkv: Tensor, **named: Any) -> Tensor:
        raise RuntimeError("head size 64 is not supported\nmore lines")

    def forgets_prompts(query: Tensor, key: Tensor, value: Tensor, *, packed: Any, scale: float) -> Tensor:
        return attention_by_length(query, key, value, packed=packed, scale=scale)

    assert backends.why_wrong(gives_up, CPU) == "on packed sequences: head size 64 is not supported"
    assert str(backends.why_wrong(forgets_prompts, CPU)).startswith("on shared prompts it differs from float64 by ")
    assert backends.why_wrong(RIGHT, CPU) is None


# ------------------------------------------------------------------------------------------------ flash attention


def flash3(
    monkeypatch: pytest.MonkeyPatch, *, attend: Callable[..., Tensor], major: int = 9, error: Exception | None = None
) -> list[str]:
    """As if the package were there, and computed so. What is done with torch's registry."""
    done: list[str] = []

    def activate(name: str) -> None:
        if error is not None:
            raise error
        done.append(name)

    monkeypatch.setattr(backends, "find_spec", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(backends, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(backends, "restore_flash_attention_impl", lambda: done.append("restored"))
    monkeypatch.setattr(backends, "flash_or_exact", lambda dtype: attend)
    return done


def wrong(query: Tensor, key: Tensor, value: Tensor, *, packed: Any, scale: float) -> Tensor:
    return RIGHT(query, key, value, packed=packed, scale=2 * scale)


def test_flash_attention_3_is_active_where_it_is_there_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    done = flash3(monkeypatch, attend=RIGHT)
    backends.attend_on_gpus(torch.float32, "flash")
    assert done == []  # float32 takes none
    backends.attend_on_gpus(torch.bfloat16, "flash")
    assert backends.why_not_flash3() is None and done == ["FA3"]


@pytest.mark.parametrize(
    ("changes", "reason", "did"),
    [
        ({"attend": wrong}, "on packed sequences it differs from float64", ["FA3", "restored"]),
        ({"attend": RIGHT, "major": 10}, "it takes a Hopper GPU", []),
        ({"attend": RIGHT, "error": ImportError("undefined symbol: x")}, "undefined symbol: x", []),
    ],
)
def test_else_it_stays_off_and_the_reason_is_known(
    changes: dict, reason: str, did: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = flash3(monkeypatch, **changes)
    assert str(backends.why_not_flash3()).startswith(reason) and done == did


def test_what_somebody_has_activated_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    done = flash3(monkeypatch, attend=wrong)
    monkeypatch.setattr(backends, "current_flash_attention_impl", lambda: "FA4")
    assert backends.why_not_flash3() is None and done == []


def test_without_the_package_the_gpu_is_not_asked() -> None:
    assert backends.why_not_flash3() == "No module named 'flash_attn_interface'"


@pytest.mark.parametrize(
    ("given", "expected"), [(AttnBackend.auto, "flash"), (AttnBackend.flash, "flash"), (AttnBackend.fused, "fused")]
)
def test_the_argument_reaches_the_layers(given: AttnBackend, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def functions(dtype: torch.dtype, **named: Any) -> AttentionFunctions:
        asked.append((dtype, named["backend"]))
        return AttentionFunctions(attention_by_length, lambda x, cos, sin: x)

    monkeypatch.setattr(mixer_modules, "attention_functions", functions)
    named = {"attention_backend": given, "recompute_granularity": None}
    config: Any = SimpleNamespace(params_dtype=torch.bfloat16, **named)
    layer_specs.block_spec(SPEC, (0, 1), config, Place(1, 0))
    assert asked == [(torch.bfloat16, expected)]
