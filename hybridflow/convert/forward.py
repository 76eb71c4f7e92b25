"""Logits of a few random prompts: a model as transformers runs it against the same model as megatron runs it.

Both compute in float32 on the CPU of this one process, one after the other. For a model with a value head the values
of all tokens are compared.
"""

import gc
import logging
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.errors import CheckpointError
from hybridflow.models import pipeline
from hybridflow.models.attention import PackedSequences
from hybridflow.models.build import build_model
from hybridflow.models.micro_batch import MicroBatch
from hybridflow.models.output_layer import logits_or_values
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.platform import Platform

TOLERANCE = 1e-4
LENGTHS = (3, 9, 17, 24)


def largest_difference(huggingface: Path, megatron: Path, *, seed: int = 0, trust_remote_code: bool = False) -> float:
    """Between the logits of transformers, from a HuggingFace directory, and of megatron, from one of either kind."""
    spec = read_spec(megatron)
    prompts = random_prompts(read_spec(huggingface), seed)
    expected = huggingface_logits(huggingface, prompts, trust_remote_code=trust_remote_code)
    gc.collect()
    platform = platforms.start(seed=0, platform="cpu")
    try:
        found = megatron_logits(spec, prompts, platform)
    finally:
        platforms.stop()
    if found.shape != expected.shape:
        raise CheckpointError(
            f"{megatron}: logits have shape {tuple(found.shape)}, those of {huggingface} {tuple(expected.shape)}"
        )
    difference = (found - expected).abs().max()
    return float("inf") if difference.isnan() else float(difference)


def random_prompts(spec: ModelSpec, seed: int) -> list[Tensor]:
    """Of lengths up to what the model knows, (length,) int64 each."""
    generator = torch.Generator().manual_seed(seed)
    longest = min(spec.max_positions, spec.reach or spec.max_positions)
    return [torch.randint(spec.vocab_size, (min(length, longest),), generator=generator) for length in sorted(LENGTHS)]


def huggingface_logits(path: Path, prompts: list[Tensor], *, trust_remote_code: bool) -> Tensor:
    """(all tokens, vocabulary), or (all tokens, 1) from a value head."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar, get_logger

    disable_progress_bar()
    # which advises packages for GPUs, where gated delta nets are computed without
    get_logger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    score = read_spec(path).head == "score"
    auto = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    model = auto.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
    ).eval()
    with torch.no_grad():
        if score:  # the model's own forward pass scores the last token alone
            return torch.cat([model.score(model.base_model(prompt[None])[0])[0] for prompt in prompts])
        return torch.cat([model(prompt[None]).logits[0] for prompt in prompts])


def megatron_logits(spec: ModelSpec, prompts: list[Tensor], platform: Platform) -> Tensor:
    """As `huggingface_logits`, from hybridflow's own model on one process."""
    grid = Grid.build(Layout(1, 1, 1, (0,)), ProcessGroups())
    chunks = build_model(
        spec,
        grid,
        head=spec.head,
        dtype="float32",
        sequence_parallel=False,
        recompute="none",
        device=platform.device,
    )
    batch = packed_micro_batch(prompts, platform.device)
    logits = pipeline.forward(chunks, grid, [batch], lambda output, _: {"out": logits_or_values(output).cpu()})[0][
        "out"
    ]
    return logits[:, None] if spec.head == "score" else logits[:, : spec.vocab_size]


def packed_micro_batch(prompts: list[Tensor], device: torch.device) -> MicroBatch:
    """All prompts packed, every token's output wanted."""
    lengths = tuple(len(prompt) for prompt in prompts)
    tokens = torch.arange(sum(lengths))
    return MicroBatch(
        input_ids=torch.cat(prompts).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        packed=PackedSequences.from_lengths(lengths, device),
        rows=tokens.to(device),
        where=tokens,
        targets=tokens.to(device),
    )
