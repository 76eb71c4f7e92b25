"""Models of the layers that a GPU would choose, with Transformer Engine and without, beside transformers.

python -m tests.models.engine_worker FOLDER OUT, with tests/models/simulated on Python's path, which has the simulated
Transformer Engine. FOLDER/FAMILY/{policy,reward} are checkpoints.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.extensions import transformer_engine

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import model_weights
from hybridflow.convert.forward import huggingface_logits, packed_micro_batch, random_prompts
from hybridflow.models import build, layer_classes, pipeline
from hybridflow.models.build import PackedModel
from hybridflow.models.named_weights import named_weights
from hybridflow.models.output_layer import plain
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.platform import Platform


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
            found[f"{path.parent.name} {path.name} {engine}"] = seen(spec, chunks, grid, prompts, expected)
    out.write_text(json.dumps(found))
    platforms.stop()


def built(spec: ModelSpec, grid: Grid, platform: Platform, *, engine: bool) -> list[PackedModel]:
    options = dict(dtype="float32", sequence_parallel=False, recompute="none", device=platform.device)
    with chosen_as_on_cuda(engine):
        return build.build_model(spec, grid, head=spec.head, **options)


@contextlib.contextmanager
def chosen_as_on_cuda(engine: bool) -> Iterator[None]:
    with mock.patch.multiple(layer_classes, uses_cuda=lambda: True, HAVE_TE=engine):
        yield


def seen(
    spec: ModelSpec, chunks: list[PackedModel], grid: Grid, prompts: list[torch.Tensor], expected: torch.Tensor
) -> dict[str, Any]:
    (model,), micro_batch = chunks, packed_micro_batch(prompts, torch.device("cpu"))
    logits = pipeline.forward(chunks, grid, [micro_batch], lambda output, _: {"logits": plain(output)})[0]["logits"]
    logits = logits[:, None] if spec.head == "score" else logits[:, : spec.vocab_size]
    plain(model(micro_batch)).square().mean().backward()
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
