"""Operations of models against what torch counts in transformers' models, and peaks against the shipped profiles."""

from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hybridflow.architecture.flops import PEAKS, forward_flops, peak_flops
from hybridflow.architecture.spec import read_spec
from hybridflow.automap.device import load_profile
from hybridflow.trainers.auto import BY_NAME
from tests.tiny_models import make_checkpoints

LENGTHS = [7, 12]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt_350m"])
def test_a_forward_pass_is_what_torch_counts_in_transformers(family: str, tmp_path: Path) -> None:
    """Where attention is not causal for the counter: all L^2 pairs, twice as many."""
    policy = make_checkpoints(tmp_path, family=family, tied=False) / "policy"
    spec = read_spec(policy)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, attn_implementation="eager")
    counted = 0
    for length in LENGTHS:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.ones(1, length, dtype=torch.int64), use_cache=False)
        counted += counter.get_total_flops()
    pairs = sum(length**2 for length in LENGTHS)
    counted -= spec.num_layers * 4 * spec.num_heads * spec.head_dim * pairs / 2
    if spec.projected_size:  # two small products beside the layers
        counted -= 2 * 2 * spec.hidden_size * spec.projected_size * sum(LENGTHS)
    found = forward_flops(spec, torch.tensor(LENGTHS), sum(LENGTHS), head="lm")
    assert found == pytest.approx(counted)


def test_a_mixture_counts_the_experts_of_a_token_and_dense_layers_as_they_are(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoints(tmp_path, family="glm4_moe", tied=False) / "policy")
    h, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = h * (q + 2 * kv) + q * h
    dense = attention + 3 * h * spec.dense_ffn_hidden_size
    experts = attention + 4 * h + 3 * h * 32 * (2 + 1)  # the router of 4, two experts and the shared one
    layers = 2 * 5 * (dense + (spec.num_layers - 1) * experts) + spec.num_layers * 4 * q * 25 / 2
    assert forward_flops(spec, torch.tensor([5]), 3, head="lm") == layers + 2 * h * spec.vocab_size * 3
    assert forward_flops(spec, torch.tensor([5]), 1, head="score") == layers + 2 * h


def test_the_peaks_are_those_of_the_profiles() -> None:
    for part, profile in BY_NAME:
        products = load_profile(profile).product_rates
        assert PEAKS[part] == {dtype: products(dtype).peak for dtype in ("bfloat16", "float32")}
    assert {part for part, _ in BY_NAME} == set(PEAKS)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("CUDA (NVIDIA H100 80GB HBM3)", 989e12),
        ("CUDA (NVIDIA A100-SXM4-80GB)", 312e12),
        ("CUDA (NVIDIA H100 PCIe)", None),  # slower, and not known
        ("CUDA (NVIDIA H200 NVL)", None),
        ("CPU", None),
    ],
)
def test_a_device_is_known_by_the_name(device: str, peak: float | None) -> None:
    assert peak_flops(device, "bfloat16") == peak
