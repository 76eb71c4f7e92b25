"""torch_dist checkpoints of a model, and safetensors of mixtures: weights by their HuggingFace names.

A torch_dist directory holds `.metadata`, files of records, megatron's `metadata.json` and `common.pt`
(`formats.distributed_metadata`, `formats.distributed_directory`). megatron-core's own dist_checkpointing loads what is
written here, at any layout.

transformers 5 keeps the matrices of all experts of a layer in one tensor, and tools that save parameters write it:

    model.layers.3.mlp.experts.gate_up_proj   (experts, 2 x size, hidden): of each expert the gate's rows, then up's
    model.layers.3.mlp.experts.down_proj      (experts, hidden, size)

Such a file is read as if it had one tensor an expert.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridflow.architecture.parts import Block, blocks, whole_shape
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.tables import FUSED_NAMES, VALUE_HEAD
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import layer_weights, model_weights, stored_at
from hybridflow.architecture.wrapper import MISNAMED_HEAD, WRAPPED
from hybridflow.errors import CheckpointError
from hybridflow.formats.block_fp8 import BlockFp8Directory
from hybridflow.formats.directories import sync
from hybridflow.formats.distributed_directory import BACKEND, DESCRIPTION, DistributedDirectory, is_distributed
from hybridflow.formats.distributed_metadata import METADATA
from hybridflow.formats.distributed_storage import Chunk, save
from hybridflow.formats.file_bytes import Shape
from hybridflow.formats.safetensors_files import (
    ALL,
    SafetensorsDirectory,
    TensorInfo,
    box_of,
    check_readable,
)

NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")


@dataclass(frozen=True)
class _Part:
    """A HuggingFace tensor in the whole parameter of megatron."""

    shape: Shape
    expert_rows: int | None  # of each of the parameter's experts, where it has any
    blocks: tuple[Block, ...]  # where the part's rows lie
    key: str
    layer: int | None  # along the leading axis of the stored tensor


class MegatronDirectory:
    """The weights of a model in a torch_dist directory, by their HuggingFace names.

    Errors: CheckpointError as `DistributedDirectory`, and where a tensor has not the shape that config.json asks for.
    """

    tensors: Mapping[str, TensorInfo]
    unknown: tuple[str, ...]  # tensors that are neither weights of this model nor known not to be weights
    missing: tuple[str, ...]  # HuggingFace tensors of this model that are not there

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self.path = Path(path)
        self._spec = spec
        self._files = DistributedDirectory(path)
        self._parts: dict[str, _Part] = {}
        missing: list[str] = []
        for weight in model_weights(spec, spec.head):
            found = next((place for place in _places(weight) if place[0] in self._files), None)
            if found is None:
                missing += weight.hf
            else:
                self._check_shape(weight, *found)
                self._parts |= _parts_of(weight, spec, *found)
        keys = {part.key for part in self._parts.values()}
        for key in sorted(keys):
            self._files.check_complete(key)
        self.missing = tuple(missing)
        self.unknown = tuple(key for key in self._files.tensors if key not in keys and not _no_weight(key))
        self.tensors = {
            name: TensorInfo(part.shape, self._files.tensors[part.key].dtype) for name, part in self._parts.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def file_of(self, name: str) -> Path:
        return self._files.file_of(self._parts[name].key)

    def read(self, name: str, shape: Shape, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Rows (dim 0) and columns (dim 1) of tensor `name`, whose full shape must be `shape`, as fresh memory."""
        if name not in self._parts:
            raise CheckpointError(f"{self.path}: no tensor {name} in {METADATA}")
        part = self._parts[name]
        check_readable(self.path / METADATA, part.key, self.tensors[name], shape)
        offset, size = box_of(shape, rows, columns)
        whole = torch.empty(size, dtype=self.tensors[name].dtype)
        # a convolution's (channels, 1, width) is stored as a matrix
        out, columns_from = (whole, offset[1:]) if len(shape) < 3 else (whole.flatten(1), (0,))
        for row, count, target_row in _rows_of(part, offset[0], offset[0] + size[0]):
            self._read_rows(part, row, columns_from, out[target_row : target_row + count])
        return whole

    def _read_rows(self, part: _Part, row: int, columns: Shape, out: Tensor) -> None:
        """Fill `out` with rows from `row` of the whole parameter, counted through all experts."""
        leading: tuple[int, ...] = () if part.layer is None else (part.layer,)
        if part.expert_rows is not None:
            expert, row = divmod(row, part.expert_rows)
            leading += (expert,)
        self._files.read_into(part.key, (*leading, row, *columns), out[(None,) * len(leading)])

    def _check_shape(self, weight: Weight, key: str, layer: int | None) -> None:
        """The stored tensor has the whole parameter's shape, before it the layers; a vocabulary may be padded."""
        expected = whole_shape(weight, self._spec)
        if layer is not None:
            expected = (self._spec.num_layers, *expected)
        shape = self._files.tensors[key].shape
        padded = weight.split is Split.VOCAB and shape[1:] == expected[1:] and shape[:1] >= expected[:1]
        if shape != expected and not padded:
            raise CheckpointError(
                f"{self.path / METADATA}: {key} has shape {shape}, config.json asks for {expected} ({weight.hf[0]})"
            )


def _places(weight: Weight) -> Iterator[tuple[str, int | None]]:
    """(key, layer) where a weight may be stored: layers in one tensor or one each, norms by either name."""
    stacked, layer = stored_at(weight)
    places = [(stacked, layer)]
    if layer is not None:
        places.append((stacked.replace("decoder.layers.", f"decoder.layers.{layer}.", 1), None))
    for key, index in places:
        yield key, index
        for fused, plain in FUSED_NAMES.items():
            if fused in key or plain in key:
                yield key.replace(fused, plain) if fused in key else key.replace(plain, fused), index


def _no_weight(key: str) -> bool:
    return key.startswith(NO_WEIGHTS) or "_extra_state" in key


def _parts_of(weight: Weight, spec: ModelSpec, key: str, layer: int | None) -> dict[str, _Part]:
    """The HuggingFace tensors of a weight that is stored there."""
    of_parts: list[list[Block]] = [[] for _ in weight.hf]
    for block in blocks(weight, spec):
        of_parts[block.part].append(block)
    expert_rows = whole_shape(weight, spec)[1] if weight.experts else None
    return {
        name: _Part(shape, expert_rows, tuple(of_part), key, layer)
        for name, shape, of_part in zip(weight.hf, weight.shapes(spec), of_parts, strict=True)
    }


def _rows_of(part: _Part, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(row in the whole parameter, count, row of the result) of rows start:stop of a HuggingFace tensor."""
    for block in part.blocks:
        low, high = max(start, block.start), min(stop, block.start + block.rows)
        if low < high:
            yield block.row + low - block.start, high - low, low - start


# --------------------------------------------------------------------------------------------------- either kind


def open_checkpoint(path: str | Path, spec: ModelSpec) -> SafetensorsDirectory | MegatronDirectory:
    """The weights of a directory of either kind, by their HuggingFace names."""
    return MegatronDirectory(path, spec) if is_distributed(path) else open_safetensors(path, spec)


# --------------------------------------------------------------------------------------------------- writing


def write_distributed(
    directory: Path,
    chunks: Sequence[Chunk],
    *,
    group: ProcessGroup | None = None,
    written: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write this rank's chunks; collective over `group`, without one this process writes all there is.

    Every rank holds one chunk at a time and writes one file; the first rank of the group also writes `.metadata`, the
    places of chunks. What is written is on the disk when this returns. `written` gets the bytes of each chunk.
    Errors: those of `Chunk.read` and of the disk; ValueError where the chunks of all ranks do not cover their tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save(directory, chunks, [key for chunk in chunks for key in extra_states(chunk)], group, written)
    if group is None or group.rank() == 0:
        torch.save({}, directory / "common.pt")
        description = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
        description |= {"common_backend": "torch", "common_backend_version": 1}
        (directory / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
        for path in (directory / "common.pt", directory / DESCRIPTION, directory):
            sync(path)


def extra_states(chunk: Chunk) -> Iterator[str]:
    """Keys of the empty extra states that megatron's linear layers look for, those of the layers of this chunk.

    One chunk of a weight has them: the chunk with the first element.
    """
    module, _, kind = chunk.key.rpartition(".")
    leading = len(chunk.whole) - 2
    if not module.startswith("decoder.layers.") or "linear_" not in module or kind != "weight" or leading < 1:
        return
    if any(chunk.offset[leading:]):
        return
    total = ".".join(map(str, chunk.whole[:leading]))
    ranges = [range(o, o + n) for o, n in zip(chunk.offset[:leading], chunk.shape[:leading], strict=True)]
    for place in product(*ranges):
        yield f"{module}._extra_state/shard_{'.'.join(map(str, place))}_{total}"


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


def check_score_head(role: str, spec: ModelSpec) -> None:
    """Without the head's weight a reward model would score everything 0. Errors: CheckpointError, naming the role."""
    name = VALUE_HEAD.hf[0]
    if name not in open_checkpoint(spec.path, spec):
        raise CheckpointError(
            f"{role}.model = {spec.path} has no {name}: each score would be 0. Give a model that scores"
        )
