"""Models of the layers that a GPU would choose, with Transformer Engine and without, beside transformers.

python -m tests.models.engine_worker FOLDER OUT, with tests/models/simulated on Python's path, which has the simulated
Transformer Engine. FOLDER/FAMILY/{policy,reward} are checkpoints.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.extensions import transformer_engine

from hybridflow.architecture.lora import Lora
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import model_weights
from hybridflow.config.recompute import Recompute
from hybridflow.convert.forward import huggingface_logits, packed_micro_batch, random_prompts
from hybridflow.models import build, layer_classes, optimizer, pipeline
from hybridflow.models.build import PackedModel
from hybridflow.models.named_weights import named_weights
from hybridflow.models.output_layer import logits_or_values
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.platform import Platform
from hybridflow.placement.recomputation import modules_in


def main(folder: Path, out: Path) -> None:
    assert transformer_engine.HAVE_TE
    platform = platforms.start(seed=0, platform="cpu")
    grid, found = Grid.build(Layout(1, 1, 1, (0,)), ProcessGroups()), {}
    for path in sorted(folder.glob("*/*")):
        spec = read_spec(path)
        prompts = random_prompts(spec, seed=0)
        expected = huggingface_logits(path, prompts, trust_remote_code=False)
        for engine in (True, False):
            chunks = built(spec, grid, platform, engine=engine)
            of_model = seen(spec, chunks, grid, prompts, expected) | {
                "fused": fused(spec, grid, platform, engine=engine)
            }
            found[f"{path.parent.name} {path.name} {engine}"] = of_model
        adapted = replace(spec, lora=Lora(rank=4, alpha=8.0))
        found[f"{path.parent.name} {path.name} adapters"] = with_adapters(adapted, grid, platform, prompts, expected)
        found[f"{path.parent.name} {path.name} again"] = again(spec, grid, platform)
    out.write_text(json.dumps(found))
    platforms.stop()


def with_adapters(
    spec: ModelSpec, grid: Grid, platform: Platform, prompts: list[torch.Tensor], expected: torch.Tensor
) -> dict[str, Any]:
    """New ones change nothing; others compute the same, and have the same gradients, with either kind of layers."""
    found: dict[str, Any] = {}
    sums = []
    for engine in (True, False):
        chunks = built(spec, grid, platform, engine=engine, fused=None)
        found[f"new {engine}"] = seen_values(spec, chunks, grid, prompts, expected)
        for weight, parameter in named_weights(chunks, spec, head=spec.head):
            if weight.adapter == "b":
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(weight.megatron)))
        layers = chunks[0].decoder.layers.modules()
        found[f"classes {engine}"] = sorted({type(x).__name__ for x in layers if list(x.parameters(recurse=False))})
        sums.append((outputs_of(chunks, grid, prompts), gradients(spec, grid, chunks)))
    (one, first), (other, second) = sums
    found["apart"] = float((one - other).abs().max())
    found["trained"] = sorted({re.sub(r"layers\.\d+", "layers", name) for name in first})
    found["gradients apart"] = max(float((x - second[name][0]).abs().max()) for name, (x, _) in first.items())
    found["without gradient"] = sorted(name for name, (x, _) in first.items() if not bool((x != 0).any()))
    return found


def again(spec: ModelSpec, grid: Grid, platform: Platform) -> dict[str, Any]:
    """With Transformer Engine's layers: all modules computed again beside none. A norm may be in another layer then."""
    plain_one, other = (built(spec, grid, platform, engine=True, recompute=how) for how in ("none", modules_in(spec)))
    first, second = (gradients(spec, grid, chunks) for chunks in (plain_one, other))
    shared = [name for name in first if name in second]
    return {
        "modules": modules_in(spec),
        "classes": sorted({type(x).__name__ for x in other[0].decoder.layers.modules()}),
        "elsewhere": sorted({name.rpartition(".")[2] for name in first if name not in second}),
        "apart": max(float((first[name][0] - second[name][0]).abs().max()) for name in shared),
    }


def outputs_of(chunks: list[PackedModel], grid: Grid, prompts: list[torch.Tensor]) -> torch.Tensor:
    micro_batch = packed_micro_batch(prompts, torch.device("cpu"))
    return pipeline.forward(chunks, grid, [micro_batch], lambda output, _: {"out": logits_or_values(output)})[0]["out"]


def seen_values(
    spec: ModelSpec, chunks: list[PackedModel], grid: Grid, prompts: list[torch.Tensor], expected: torch.Tensor
) -> float:
    found = outputs_of(chunks, grid, prompts)
    found = found[:, None] if spec.head == "score" else found[:, : spec.vocab_size]
    return float((found - expected).abs().max())


def built(
    spec: ModelSpec,
    grid: Grid,
    platform: Platform,
    *,
    engine: bool,
    fused: bool | None = False,
    recompute: Recompute = "none",
) -> list[PackedModel]:
    """fused: whether gradients are added within products; None: as is chosen. Without buffers they cannot be."""
    options = dict(dtype="float32", sequence_parallel=False, recompute=recompute, device=platform.device)
    options |= {} if fused is None else {"arguments": {"gradient_accumulation_fusion": fused}}
    with chosen_as_on_cuda(engine):
        return build.build_model(spec, grid, head=spec.head, **options)


@contextlib.contextmanager
def chosen_as_on_cuda(engine: bool) -> Iterator[None]:
    # Triton's kernels need a GPU: tests/models/test_expert_rows.py has them in the interpreter
    with mock.patch.multiple(layer_classes, uses_cuda=lambda: True, HAVE_TE=engine, HAS_TRITON=False):
        yield


def fused(spec: ModelSpec, grid: Grid, platform: Platform, *, engine: bool) -> dict[str, Any]:
    """Over three micro-batches: weights whose gradients layers have added, and the largest difference to autograd's."""
    as_chosen, plain_ones = (
        gradients(spec, grid, built(spec, grid, platform, engine=engine, fused=choice)) for choice in (None, False)
    )
    assert all(bool((x != 0).any()) for x, _ in as_chosen.values())
    return {
        "weights": sorted({re.sub(r".*layers\.\d+\.", "", name) for name, (_, added) in as_chosen.items() if added}),
        "without": sorted(name for name, (_, added) in plain_ones.items() if added),
        "difference": max(float((x - plain_ones[name][0]).abs().max()) for name, (x, _) in as_chosen.items()),
    }


def gradients(spec: ModelSpec, grid: Grid, chunks: list[PackedModel]) -> dict[str, tuple[torch.Tensor, bool]]:
    """Of each trained parameter the gradient, and whether a layer has added it."""
    with mock.patch.object(optimizer, "fuse_weight_gradients", lambda model: None):  # what a CPU does besides
        wrapped = [
            optimizer.BucketedDataParallel(chunk, grid, zero1=False, bucket_elements=None, overlap=False)
            for chunk in chunks
        ]
    batches = [packed_micro_batch(random_prompts(spec, seed=seed), torch.device("cpu")) for seed in (1, 2, 3)]
    pipeline.forward_backward(wrapped, grid, batches, lambda output, _: (logits_or_values(output).square().mean(), {}))
    parameters: Any = {name: x for name, x in chunks[0].named_parameters() if x.requires_grad}
    return {name: (x.main_grad.clone(), x.grad_added_to_main_grad) for name, x in parameters.items()}


def seen(
    spec: ModelSpec, chunks: list[PackedModel], grid: Grid, prompts: list[torch.Tensor], expected: torch.Tensor
) -> dict[str, Any]:
    (model,), micro_batch = chunks, packed_micro_batch(prompts, torch.device("cpu"))
    logits = pipeline.forward(chunks, grid, [micro_batch], lambda output, _: {"logits": logits_or_values(output)})[0][
        "logits"
    ]
    logits = logits[:, None] if spec.head == "score" else logits[:, : spec.vocab_size]
    logits_or_values(model(micro_batch)).square().mean().backward()
    layer = model.decoder.layers[0]
    return {
        "difference": float((logits - expected).abs().max()),
        "layer": type(layer).__name__,
        "holds parameters": sorted(
            {type(x).__name__ for x in model.decoder.layers.modules() if list(x.parameters(recurse=False))}
        ),
        "not in the model": sorted(
            {weight.megatron for weight in model_weights(spec, spec.head)}
            - {weight.megatron for weight, _ in named_weights(chunks, spec, head=spec.head)}
        ),
        "without gradient": [
            name
            for name, x in model.named_parameters()
            if x.requires_grad and (x.grad is None or not bool(x.grad.isfinite().all()))
        ],
    }


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
