"""The parameters of a rank's model chunks by the entries of the weight table, and filling them from a checkpoint."""

import math
from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from hybridflow.architecture.parts import TensorFiles, read_shard, shard_shape
from hybridflow.architecture.peft_directory import Adapters
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.architecture.tables import VALUE_HEAD
from hybridflow.architecture.tied_head import OUTPUT
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weight_files import open_checkpoint
from hybridflow.architecture.weights import canonical_name, embedding, model_weights
from hybridflow.models.layers import mark
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.seeds import request_seed


def named_weights(chunks: Sequence[nn.Module], spec: ModelSpec, *, head: Head) -> Iterator[tuple[Weight, nn.Parameter]]:
    """This rank's parameters with their entries of the weight table, in the table's order.

    Where a tied embedding has a second copy on the last pipeline stage, that one is the last stage's embedding.
    """
    parameters = {}
    for chunk in map(unwrapped, chunks):
        layers: tuple[int, ...] = vars(chunk)["layers"]  # `models.build.PackedModel`
        for name, parameter in chunk.named_parameters():
            parameters[_with_global_layer(canonical_name(name), layers)] = parameter
    if spec.tied and head == "lm" and OUTPUT in parameters:
        parameters[embedding(spec).megatron] = parameters.pop(OUTPUT)
    for weight in model_weights(spec, head):
        if weight.megatron in parameters:
            yield weight, parameters.pop(weight.megatron)
    assert not parameters, f"parameters without an entry in the weight table: {sorted(parameters)}"


def unwrapped(model: nn.Module) -> LanguageModule:
    """A chunk without megatron's wrappers."""
    while not isinstance(model, LanguageModule):
        assert isinstance(model.module, nn.Module), f"{type(model).__name__} holds no model"
        model = model.module
    return model


def _with_global_layer(name: str, layers: tuple[int, ...]) -> str:
    """megatron counts layers within a chunk, the table over the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)


def load_weights(
    chunks: Sequence[nn.Module], spec: ModelSpec, grid: Grid, *, head: Head, head_seed: int | None = None
) -> None:
    """Read this rank's slices of every weight. A missing score.weight is drawn from the seed, or stays zero."""
    files = open_checkpoint(spec.path, spec.base)
    adapters = None if spec.lora is None else Adapters(spec.lora)
    with torch.no_grad():
        for weight, parameter in named_weights(chunks, spec, head=head):
            _mark_split(parameter, weight)
            source: TensorFiles = files
            if adapters is not None and (weight.adapter or weight.hf[0] in adapters):
                source = adapters
            elif weight == VALUE_HEAD and VALUE_HEAD.hf[0] not in files:
                if head_seed is not None:
                    parameter.copy_(new_score_head(spec.hidden_size, head_seed))
                continue
            shard = read_shard(source, weight, spec, grid.place(weight.group))
            assert shard.shape == parameter.shape == shard_shape(weight, spec, grid.layout.cut), (
                f"{weight.megatron}: shard {tuple(shard.shape)}, parameter {tuple(parameter.shape)}"
            )
            parameter.copy_(shard)


def new_score_head(hidden_size: int, seed: int) -> Tensor:
    """(1, hidden) float32, normal with variance 1 / (hidden + 1), as Stiennon et al. 2020 begin (arXiv 2009.01325).

    A function of the seed alone: the same on every rank and in every layout.
    """
    generator = torch.Generator().manual_seed(request_seed(seed, 0, 0))
    return torch.randn(1, hidden_size, generator=generator).div(math.sqrt(hidden_size + 1))


def _mark_split(parameter: nn.Parameter, weight: Weight) -> None:
    """Tell megatron that ranks hold different parts of this parameter.

    Megatron does so only where megatron initialises weights. Without the mark the gradient norm counts the shard of the
    first rank alone, and gradients are clipped too little.
    """
    mark(
        parameter,
        tensor_model_parallel=weight.split is not Split.REPLICATED,  # of experts too that no rank shares
        partition_dim={Split.REPLICATED: -1, Split.COLUMNS: 1}.get(weight.split, 0),
        partition_stride=1,
    )
