"""Safetensors of mixtures as transformers 5 has them in memory: one tensor for the matrices of all experts of a layer.

    model.layers.3.mlp.experts.gate_up_proj   (experts, 2 x size, hidden): of each expert the gate's rows, then up's
    model.layers.3.mlp.experts.down_proj      (experts, hidden, size)

`save_pretrained(..., save_original_format=False)` writes them, as do tools that save a model's parameters. Each
expert's matrix is a piece of such a tensor, so that the file is read as if it had one tensor an expert.
"""

from math import prod
from pathlib import Path

from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import layer_weights
from hybridflow.architecture.wrapper import MISNAMED_HEAD, WRAPPED
from hybridflow.errors import CheckpointError
from hybridflow.formats.block_fp8 import BlockFp8Directory
from hybridflow.formats.safetensors_files import SafetensorsDirectory

GATE_UP, DOWN, ROUTER = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
FUSED = {"mlp.experts.linear_fc1.weight": GATE_UP, "mlp.experts.linear_fc2.weight": DOWN, "mlp.router.weight": ROUTER}


def open_safetensors(path: str | Path, spec: ModelSpec) -> SafetensorsDirectory:
    """The tensors by the names of the family's published checkpoints, also where experts lie in one tensor.

    Errors: CheckpointError, also for a tensor of experts whose shape is not the one that config.json asks for.
    """
    directory = BlockFp8Directory(path) if spec.block_fp8 else SafetensorsDirectory(path)
    if MISNAMED_HEAD in directory:
        raise CheckpointError(
            f"{directory.file_of(MISNAMED_HEAD)}: {MISNAMED_HEAD} is no name by which transformers reads an output "
            f"layer; lm_head.weight is"
        )
    for beginning, other in WRAPPED.items():
        directory.rename(beginning, other)
    for layer in range(spec.num_layers if spec.num_experts else 0):
        there = f"model.layers.{layer}.mlp."
        kind = spec.layer_kind(layer)
        if kind.mlp != "experts" or f"{there}{GATE_UP}" not in directory:
            continue
        for weight in layer_weights(spec, kind):
            fused = FUSED.get(weight.megatron.removeprefix("decoder.layers.{layer}."))
            if fused is not None and there + fused in directory:
                _cut(directory, there + fused, weight.for_layer(layer), spec)
    return directory


def _cut(directory: SafetensorsDirectory, name: str, weight: Weight, spec: ModelSpec) -> None:
    """Give the parts of a weight, which lie one behind the other in a tensor, the tensor's place."""
    shapes = weight.shapes(spec)
    whole = shapes[0]
    if weight.experts:
        whole = (weight.experts, sum(map(prod, shapes)) // weight.experts // shapes[0][1], shapes[0][1])
    directory.cut(name, whole, dict(zip(weight.hf, shapes, strict=True)))
