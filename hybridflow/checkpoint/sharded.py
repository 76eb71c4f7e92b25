"""A role as a torch_dist checkpoint of megatron-core: the weights and, for a trained role, the optimizer.

The tensors are written and read by boxes of the whole parameters. So any layout reads what any other wrote, without a
gather on either side. Each rank writes one file, when and where the caller wants, and reads only the needed bytes.
megatron's `save` and `load` are not called: 0.19.2 ignores a given strategy and writes by a built-in one.
Of what several ranks hold alike, data-parallel replicas share the writing.

    decoder.layers.mlp.linear_fc1.weight                              as tools.convert writes and reads it
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight      one for each of `OwnedState.tensors`
    optimizer.num_steps
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.architecture.shards import Interval, Split
from hybridflow.architecture.weight import Shape, Weight
from hybridflow.architecture.weight_files import extra_states
from hybridflow.architecture.weights import embedding, stored_at
from hybridflow.batch import balanced_partition
from hybridflow.checkpoint.share_chunks import ShareChunk, pieces, stored_shape
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import BACKEND, DistributedDirectory
from hybridflow.formats.distributed_metadata import METADATA
from hybridflow.formats.distributed_storage import Chunk, ChunkRecord, write_metadata
from hybridflow.formats.safetensors_files import TensorInfo
from hybridflow.models.optimizer_state import OwnedState
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import GROUPS
from hybridflow.roles.base import TrainedRole
from hybridflow.roles.policy import Reference

SavedRole = TrainedRole | Reference
COMMON = "common.pt"  # what is no tensor: nothing here. megatron reads no checkpoint without it
STEPS = "optimizer.num_steps"
NEW_MOMENTUM = "optimizer.state.momentum_buffer."  # SGD that had none so far begins with zeros, as it would at first


@dataclass(frozen=True)
class ToWrite:
    """What this rank writes of a role."""

    chunks: tuple[Chunk, ...]
    empty: tuple[str, ...]  # keys of objects without content that megatron's layers look for

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


def prepare_save(role: SavedRole, directory: Path) -> ToWrite:
    """What this rank has to write into `directory`, which is there; rank 0 has written what is common.

    The chunks read the role's memory when they are written: until then it must not change. Not collective: that they
    cover every tensor once is checked on one rank, by `write_metadata`.
    """
    if dist.get_rank() == 0:
        torch.save({}, directory / COMMON)
    chunks = tuple(box.chunk() for box in _boxes(role) if box.written)
    return ToWrite(chunks, tuple(key for chunk in chunks for key in extra_states(chunk)))


def finish_save(directory: Path, records: Iterable[ChunkRecord]) -> None:
    """On one rank, after every rank has written: write the metadata with all records and the kind of checkpoint.

    Errors: ValueError unless the records cover every tensor once.
    """
    write_metadata(directory, records)
    save_config(CheckpointingConfig(BACKEND, 1), str(directory))


def load(role: SavedRole, files: DistributedDirectory) -> None:
    """Fill the role's weights, and optimizer state if it has any, from a checkpoint of any layout. Not collective.

    Errors: CheckpointError, naming file and tensor, where one is missing, damaged, or of another shape or dtype.
    """
    boxes = _boxes(role)
    with torch.no_grad():
        for box in boxes:
            box.fill(files)
    steps = next((box for box in boxes if box.key == STEPS), None)
    if steps is not None and isinstance(role, TrainedRole):
        not_none(role.training_model).set_num_steps(int(steps.data))


# ------------------------------------------------------------------------------------------------- what a rank has


@dataclass(frozen=True)
class Box:
    """Memory of this rank that holds a box of a tensor of the checkpoint."""

    key: str
    whole: Shape
    offset: Shape
    data: Tensor  # of the box's shape
    written: bool  # by this rank; others hold the same elements

    def chunk(self) -> Chunk:
        return Chunk(self.key, self.offset, tuple(self.data.shape), self.whole, self.data.dtype, read=lambda: self.data)

    def fill(self, files: DistributedDirectory) -> None:
        """Errors: CheckpointError, naming file and tensor: it is missing, damaged, or of another shape or dtype."""
        key, data, wanted = self.key, self.data, TensorInfo(self.whole, self.data.dtype)
        if key not in files and key.startswith(NEW_MOMENTUM):
            data.zero_()
            return
        if key not in files:
            raise CheckpointError(f"{files.path / METADATA}: no tensor {key}")
        if files.tensors[key] != wanted:
            raise CheckpointError(f"{files.path / METADATA}: {key} is {files.tensors[key]}, the model has {wanted}")
        out = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype)
        files.read_into(key, self.offset, out)
        if out is not data:
            data.copy_(out)


def _boxes(role: SavedRole) -> list[Box]:
    """The tensors of a role that this rank holds. Nothing outside the role's grid."""
    trained, grid = role.training_model if isinstance(role, TrainedRole) else None, role.grid
    if not role.chunks:
        return []
    if trained is not None:
        trained.wait_for_parameters()
    weights = role.saved_weights
    own = _dealt(weights, grid)
    states: dict[int, list[OwnedState]] = {}
    for state in () if trained is None else trained.owned_states():
        states.setdefault(id(state.parameter), []).append(state)
    boxes: list[Box] = []
    if trained is not None:
        steps = torch.tensor([trained.num_steps()], dtype=torch.float64)
        boxes.append(Box(STEPS, (1,), (0,), steps, written=grid.is_first))
    for i, (weight, parameter) in enumerate(weights):
        (key, _), first_copy = stored_at(weight), _is_first_copy(weight, role)
        whole, flat = (0, parameter.numel()), parameter.data.view(-1)
        boxes += _boxes_of(role, weight, key, whole, flat, written=first_copy and i in own)
        for state in states.get(id(parameter), ()):
            for name, tensor in state.tensors.items():
                written = first_copy and (not_none(trained).zero1 or i in own)
                run, named = (state.start, state.stop), f"optimizer.state.{name}.{key}"
                boxes += _boxes_of(role, weight, named, run, tensor, written=written)
    return boxes


def _dealt(weights: list[tuple[Weight, Tensor]], grid: Grid) -> set[int]:
    """The weights that this rank writes, of those that copies of them hold alike: by number."""
    found: set[int] = set()
    for group in GROUPS:
        numbers = [i for i, (weight, _) in enumerate(weights) if weight.group == group]
        copies, copy = grid.layout.copies(group), grid.copy_index(group)
        found |= {numbers[i] for i in balanced_partition([weights[i][1].numel() for i in numbers], copies)[copy]}
    return found


def _is_first_copy(weight: Weight, role: SavedRole) -> bool:
    """Whether no rank of a lower tensor-parallel or pipeline coordinate holds the same elements."""
    grid = role.grid
    again_at_the_end = weight == embedding(role.spec) and not grid.is_first_stage  # tied
    return not again_at_the_end and (weight.split is not Split.REPLICATED or grid.tp_rank == 0)


def _boxes_of(role: SavedRole, weight: Weight, key: str, run: Interval, flat: Tensor, *, written: bool) -> list[Box]:
    """`flat`, which are elements run[0] .. run[1] of this rank's share of the weight, as boxes of the tensor `key`."""
    found = pieces(weight, role.spec, role.grid.place(weight.group), run=run)
    return [box_of(key, stored_shape(weight, role.spec), piece, flat, written=written) for piece in found]


def box_of(key: str, whole: Shape, piece: ShareChunk, flat: Tensor, *, written: bool) -> Box:
    data = flat.as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.start)
    return Box(key, whole, piece.offset, data[(None,) * (len(whole) - len(piece.shape))], written=written)
