"""The engine's layers on a CPU by the kernels in C, beside vLLM's own of the same inputs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.engine import kernels as cpu_kernels
from hybridflow.cpu.engine.kernels import attention_in_c, linear_in_c, most_rows, norm_in_c, swiglu_in_c

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_kernels")]

TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
BLOCK, HEADS, KV_HEADS, DIMS = 32, 4, 2, 32
SIZES = [(0, 20), (40, 1), (32, 3)]  # of sequences: tokens that are there, tokens that come
PLAIN = {
    "isa": "vec",
    "kv_cache_dtype": "auto",
    "attn_type": "decoder",
    "head_size": DIMS,
    "alibi_slopes": None,
    "sliding_window": -1,
    "logits_soft_cap": 0,
    "sinks": None,
}


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    """What vLLM's layers ask for when they are made."""
    from hybridflow.rollout.patches import prepare_vllm

    prepare_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    config = VllmConfig()
    with set_current_vllm_config(config):
        config.model_config = SimpleNamespace(dtype=torch.float32)
        yield


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_of(ours: bool, dtype: torch.dtype) -> Tensor:
    """Tokens that are written into an empty cache in two steps; the outputs of the second."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

    attention = CPUAttentionBackendImpl(HEADS, DIMS, 0.3, KV_HEADS, None, None, "auto")
    if not ours:
        attention.is_ours = False
    layer = SimpleNamespace(isa="vec", _k_scale_float=1.0, _v_scale_float=1.0)
    cache = torch.zeros(7, KV_HEADS, BLOCK, 2 * DIMS, dtype=dtype)
    table = torch.tensor([[3, 0], [6, 1], [2, 5]], dtype=torch.int32)
    out = torch.empty(0)
    for step in range(2):
        befores = [before * step for before, _ in SIZES]
        news = [new if step else before for before, new in SIZES]
        tokens = drawn(sum(news), HEADS + 2 * KV_HEADS, DIMS, seed=step, dtype=dtype)
        query, key, value = tokens.split([HEADS, KV_HEADS, KV_HEADS], 1)
        places = [torch.arange(before, before + new) for before, new in zip(befores, news, strict=True)]
        slots = [table[i, at // BLOCK].long() * BLOCK + at % BLOCK for i, at in enumerate(places)]
        starts = torch.tensor([0, *news]).cumsum(0).int()
        lengths = torch.tensor([before + new for before, new in zip(befores, news, strict=True)], dtype=torch.int32)
        numbers = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=3,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIMS,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa="vec",
            enable_kv_split=True,
        )
        about = CPUAttentionMetadata(
            num_actual_tokens=len(query),
            max_query_len=max(news),
            query_start_loc=starts,
            max_seq_len=int(lengths.max()),
            seq_lens=lengths,
            block_table=table,
            slot_mapping=torch.cat(slots),
            scheduler_metadata=numbers,
        )
        out = torch.empty(len(query), HEADS, DIMS, dtype=dtype)
        attention.do_kv_cache_update(layer, key, value, cache, about.slot_mapping)
        attention.forward(layer, query, key, value, cache, about, out)
    assert attention.is_ours == ours
    return out


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_is_vllms(dtype: torch.dtype) -> None:
    ours, theirs = attention_of(True, dtype), attention_of(False, dtype)
    assert (ours.double() - theirs.double()).abs().max() <= TOLERANCES[dtype] * theirs.double().abs().max()


class Theirs:
    def do_kv_cache_update(self, *args: object) -> str:
        return "theirs"

    def forward(self, *args: object) -> str:
        return "theirs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_dtype", "fp8"),
        ("attn_type", "encoder"),
        ("head_size", 40),
        ("alibi_slopes", torch.ones(HEADS)),
        ("sliding_window", 16),
        ("logits_soft_cap", 30.0),
        ("sinks", torch.ones(HEADS)),
    ],
)
def test_what_the_kernels_do_not_know_stays_vllms(field: str, value: object) -> None:
    both = SimpleNamespace(**(PLAIN | {field: value}))  # an attention and its layer
    cache = torch.zeros(1, KV_HEADS, BLOCK, 2 * DIMS)
    methods = attention_in_c(Theirs)
    assert methods["do_kv_cache_update"](both, both, None, None, cache, None) is None
    assert methods["forward"](both, both, None, None, None, cache, object(), None) == "theirs"


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("with_sum", [False, True])
def test_norms_are_vllms(with_sum: bool) -> None:
    """To the order of sums in float32; beside the operations that vLLM's layer calls."""
    from vllm import ir

    weight, x = drawn(48, seed=1, dtype=torch.float32), drawn(5, 48, seed=2, dtype=torch.float32)
    layer = SimpleNamespace(has_weight=True, variance_size_override=None, weight=weight, variance_epsilon=1e-5)
    norm = norm_in_c(type("Theirs", (), {"forward_native": None}))["forward_native"]
    if with_sum:
        kept = drawn(5, 48, seed=3, dtype=torch.float32)
        expected = ir.ops.fused_add_rms_norm(x, kept.clone(), weight, 1e-5)
        for mine, theirs in zip(norm(layer, x, kept), expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=2e-6, atol=2e-6)
    else:
        assert torch.allclose(norm(layer, x), ir.ops.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=2e-6)


def test_in_bfloat16_the_norm_is_of_the_sum_that_is_kept() -> None:
    """1 + 2^-8 is rounded to 1, so that the norm of (1, 1) is given: 1 each, not a little less and a little more."""
    x = torch.tensor([[2.0**-8, 0.0]], dtype=torch.bfloat16)
    kept = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.ones(2, dtype=torch.bfloat16)
    layer = SimpleNamespace(has_weight=True, variance_size_override=None, weight=weight, variance_epsilon=0.0)
    norm = norm_in_c(type("Theirs", (), {"forward_native": None}))["forward_native"]
    y, total = norm(layer, x, kept)
    assert total.tolist() == [[1.0, 1.0]]
    assert y.tolist() == [[1.0, 1.0]]
    assert total.data_ptr() == kept.data_ptr()


def test_swiglu_is_vllms() -> None:
    x = drawn(5, 2 * 24, seed=4, dtype=torch.float32)
    gated = swiglu_in_c()["forward_cpu"]
    expected = torch.nn.functional.silu(x[:, :24]) * x[:, 24:]
    assert torch.allclose(gated(None, x), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_few_rows_are_multiplied_by_the_kernel_and_many_by_torch(
    with_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    theirs = cpu_kernels.linear
    monkeypatch.setattr(cpu_kernels, "linear", lambda x, *args: calls.append(len(x)) or theirs(x, *args))
    monkeypatch.setattr(cpu_kernels, "most_rows", lambda *args: 16)
    weight, bias = drawn(64, 48, seed=1, dtype=dtype), drawn(64, seed=2, dtype=dtype) if with_bias else None
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3  # of the largest value; both round once to bfloat16
    for rows in (1, 16, 17, 40):
        x = drawn(rows, 48, seed=3, dtype=dtype)
        expected = torch.nn.functional.linear(x, weight, bias)
        y = linear_in_c(x, weight, bias)
        assert (y - expected).abs().max() <= tolerance * expected.abs().max()
        assert torch.equal(y, expected) or rows <= 16
    assert calls == [1, 16]


@pytest.mark.parametrize(
    ("units", "mkl_is_slow", "multiplies_bfloat16", "threads", "expected"),
    [
        (False, True, True, 1, (128, 64, 128, 64)),
        (False, True, False, 1, (128, 64, 32, 32)),
        (True, False, True, 1, (64, 32, 512, 512)),
        (False, False, True, 1, (8, 8, 128, 64)),
        (False, False, False, 1, (8, 8, 32, 32)),
        (False, True, True, 2, (0, 0, 0, 0)),
    ],
)
def test_rows_that_are_few(
    units: bool, mkl_is_slow: bool, multiplies_bfloat16: bool, threads: int, expected: tuple[int, ...], monkeypatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: multiplies_bfloat16)
    monkeypatch.setattr(cpu_kernels, "has_units", lambda: units)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(cpu_kernels, "mkl_is_slow", lambda: mkl_is_slow)
    most_rows.cache_clear()
    found = tuple(most_rows(dtype, inner) for dtype in (torch.float32, torch.bfloat16) for inner in (1024, 4096))
    most_rows.cache_clear()
    assert found == expected


def test_a_layer_without_rows_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "linear", None)
    weight = torch.ones(4, 3)
    assert linear_in_c(torch.ones(0, 3), weight).shape == (0, 4)
    assert linear_in_c(torch.ones(1, 2, 3), weight).tolist() == [[[3.0] * 4] * 2]
