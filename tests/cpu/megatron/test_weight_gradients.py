"""Gradients of weights that products add to their buffers, beside those that autograd adds; in a process of its own, as
megatron wants a group."""

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybridflow.architecture.spec import read_spec
from hybridflow.batch import RolloutBatch
from hybridflow.config import OptimizerConfig
from hybridflow.cpu.megatron import products, weight_gradients
from hybridflow.cpu.megatron.weight_gradients import wgrad_gemm_accum_fp32
from hybridflow.models import optimizer
from hybridflow.models.build import build_model
from hybridflow.models.micro_batch import padding, prediction_micro_batches
from hybridflow.models.output_layer import logits_or_values
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

TOKENS, INPUTS, OUTPUTS = 700, 96, 130


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.compiles
def test_it_adds_the_product(dtype: torch.dtype, units: bool, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever multiplies here."""
    if not units:
        for module in (products, weight_gradients):
            monkeypatch.setattr(module, "has_units", lambda: False)
    for module in (products, weight_gradients):
        monkeypatch.setattr(module, "mkl_is_slow", lambda: slow)
    torch.manual_seed(0)
    x, grad, before = torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, OUTPUTS), torch.randn(OUTPUTS, INPUTS)
    x, grad, main_grad = x.to(dtype), grad.to(dtype), before.clone()
    wgrad_gemm_accum_fp32(x, grad, main_grad)
    right = before.double() + grad.double().t() @ x.double()
    rounded_once = 2**-8 if dtype == torch.bfloat16 and not weight_gradients.has_units() else 0.0
    assert ((main_grad - right).abs() <= 1e-4 + rounded_once * right.abs().max()).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.distributed
def test_buffers_hold_what_autograd_would_have_added(tied: bool, tmp_path: Path) -> None:
    """Of two micro-batches; of a weight that embeds and predicts too."""
    policy = make_checkpoints(tmp_path, family="qwen2", tied=tied) / "policy"
    done = run_ranks(1, "tests.cpu.megatron.test_weight_gradients", policy)
    found = json.loads(done.stdout.splitlines()[-1])
    layers, multiplied = found["layers"], 4  # qkv, proj, fc1, fc2
    assert found["calls"] == [0, 2 * (multiplied * layers + (not tied))]
    assert found["largest"] > 1e-2
    assert found["difference"] < 1e-6 * found["largest"]


def measure(model: str) -> dict:
    platforms.start(seed=0)
    calls: list[int] = []
    with mock.patch.object(optimizer, "fuse_weight_gradients", lambda model: None):
        apart = gradients(Path(model), calls)
    together = gradients(Path(model), calls)
    platforms.stop()
    return {
        "layers": read_spec(Path(model)).num_layers,
        "calls": calls,
        "largest": float(apart.abs().max()),
        "difference": float((together - apart).abs().max()),
    }


def gradients(model: Path, calls: list[int], recompute: str = "none") -> Tensor:
    """All of the buffers, after two micro-batches; and how often products have added to them."""
    spec, grid = read_spec(model), Grid.build(Layout(1, 1, 1, (0,)), ProcessGroups())
    options = dict(sequence_parallel=False, recompute=recompute, device=torch.device("cpu"))
    chunks = build_model(spec, grid, head="lm", dtype="float32", **options)
    trained = optimizer.TrainedModel(chunks, grid, OptimizerConfig(lr=1e-3), bucket_bytes=None, overlap=False)
    torch.manual_seed(1)
    lengths, prompts = torch.tensor([9, 30, 17]), torch.tensor([3, 10, 8])
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts.tolist(), strict=True)])
    batch = RolloutBatch(
        input_ids=torch.randint(1, spec.vocab_size, (int(lengths.sum()),)),
        lengths=lengths,
        prompt_lengths=prompts,
        prompt_indices=torch.arange(3),
        response_mask=mask,
        rollout_log_probs=torch.zeros(int(lengths.sum())),
        truncated=torch.zeros(3, dtype=torch.bool),
    )
    rows, device = [0, 1, 2], torch.device("cpu")
    micro_batches = prediction_micro_batches(batch, rows, max_tokens=30, padded=padding(1), device=device)
    assert len(micro_batches) == 2
    with mock.patch.object(
        weight_gradients, "wgrad_gemm_accum_fp32", mock.Mock(wraps=weight_gradients.wgrad_gemm_accum_fp32)
    ) as adds:
        (chunk,) = trained.chunks
        for micro_batch in micro_batches:
            logits_or_values(chunk(micro_batch)).square().mean().backward()
    calls.append(adds.call_count)
    return torch.cat([p.main_grad.flatten() for p in chunk.module.parameters()])


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
