"""A role as a torch_dist checkpoint of megatron-core: the weights and, for a trained role, the optimizer.

The tensors are written and read by boxes of the whole parameters. So any layout reads what any other wrote, without a
gather on either side. Each rank writes one file, when and where the caller wants, and reads only the needed bytes.
megatron's `save` and `load` are not called: 0.19.2 ignores a given strategy and writes by a built-in one.
Of what several ranks hold alike, data-parallel replicas share the writing.

    decoder.layers.mlp.linear_fc1.weight                              as tools.convert writes and reads it
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight      one for each of `OwnedState.tensors`
    optimizer.num_steps

A rank holds some rows and columns of a weight, and its optimizer steps a run of these elements: with ZeRO-1 a run that
begins and ends anywhere. A run of a matrix is at most three boxes: the end of a row, whole rows, the start of a row.
Whole experts are one box for each run of rows that a rank holds of all experts.

    stored    (layers, experts, rows, columns), without dimensions that the weight lacks; the vocabulary is padded
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.architecture.parts import matrix_of
from hybridflow.architecture.shards import Interval, Matrix, Split, common, training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight
from hybridflow.architecture.weight_files import extra_states
from hybridflow.architecture.weights import embedding, stored_at
from hybridflow.batch import balanced_partition
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import BACKEND, DistributedDirectory
from hybridflow.formats.distributed_metadata import METADATA
from hybridflow.formats.distributed_storage import Chunk, ChunkRecord, write_metadata
from hybridflow.formats.safetensors_files import TensorInfo
from hybridflow.models.optimizer import num_steps, owned_states, set_num_steps
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import GROUPS, Place
from hybridflow.roles.base import TrainedRole
from hybridflow.roles.policy import Reference


class ShareChunk(NamedTuple):
    """A view of a rank's flattened share, and the box of the stored tensor that holds the view's elements."""

    start: int
    shape: Shape  # (experts, rows, columns), without those that the weight does not have
    strides: Shape  # in the share: where a rank holds only some rows of an expert, other rows lie between two experts'
    offset: Shape  # in the stored tensor, whose layers have no counterpart in `shape`


def stored_shape(weight: Weight, spec: ModelSpec) -> Shape:
    matrix, (_, layer) = matrix_of(weight, spec), stored_at(weight)
    experts = (weight.experts,) if weight.experts else ()
    layers = () if layer is None else (spec.num_layers,)
    columns = (matrix.columns,) if _is_matrix(weight, spec) else ()
    return (*layers, *experts, matrix.rows // matrix.experts, *columns)


def pieces(weight: Weight, spec: ModelSpec, place: Place, *, run: Interval) -> Iterator[ShareChunk]:
    """Elements run[0] .. run[1] of what a rank at `place` holds, each in one piece."""
    matrix, (_, layer) = matrix_of(weight, spec), stored_at(weight)
    shard, is_matrix = training_shard(matrix, place), _is_matrix(weight, spec)
    num_held = matrix.experts // place.ep
    first_expert = place.ep_rank * num_held
    width, own = shard.num_columns, shard.num_elements // num_held  # elements of the share, of each expert alike
    leading = () if layer is None else (layer,)
    for expert, num_experts, start, stop in _experts(run, own):
        reached = expert * own - run[0]  # elements of the run before these rows of the expert
        for first, last in _of_one_expert(shard.rows, matrix, first_expert):
            size = (last - first) * width
            inner = common((0, size), (start, stop))
            for position, row, num_rows, column, num_columns in _share_boxes(*inner, width):
                shape: Shape = (num_rows,)
                strides: Shape = (width,)
                offset: Shape = (first + row,)
                if is_matrix:
                    shape, strides, offset = (*shape, num_columns), (*strides, 1), (*offset, shard.columns[0] + column)
                if weight.experts:
                    shape, strides, offset = (num_experts, *shape), (own, *strides), (first_expert + expert, *offset)
                yield ShareChunk(reached + position, shape, strides, (*leading, *offset))
            reached, start, stop = reached + size, start - size, stop - size


def _experts(run: Interval, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(first expert, experts, start, stop) of elements of a share that has `size` of each: start .. stop of each."""
    start, end = run
    while start < end:
        expert, place = divmod(start, size)
        whole = (end - start) // size if place == 0 else 0
        stop = size if whole else min(end - expert * size, size)
        yield expert, max(whole, 1), place, stop
        start = (expert + max(whole, 1) - 1) * size + stop


def _share_boxes(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(first element, row, rows, column, columns) of elements start .. stop of rows of `width`."""
    while start < stop:
        row, column = divmod(start, width)
        num_rows = (stop - start) // width if column == 0 else 0
        num_columns = width if num_rows else min(stop - start, width - column)
        yield start, row, max(num_rows, 1), column, num_columns
        start += max(num_rows, 1) * num_columns


def _of_one_expert(rows: tuple[Interval, ...], matrix: Matrix, expert: int) -> Iterator[Interval]:
    """The rows of a share that are the expert's, counted within it; of the others that it has it has the same."""
    expert_rows = matrix.rows // matrix.experts
    above = expert * expert_rows
    for interval in rows:
        start, stop = common(interval, (above, above + expert_rows))
        if start < stop:
            yield start - above, stop - above


def _is_matrix(weight: Weight, spec: ModelSpec) -> bool:
    return len(weight.shapes(spec)[0]) > 1


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
        set_num_steps(not_none(role.training_model), int(steps.data))


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
    states = {} if trained is None else {id(state.parameter): state for state in owned_states(trained)}
    boxes: list[Box] = []
    if trained is not None:
        steps = torch.tensor([num_steps(trained)], dtype=torch.float64)
        boxes.append(Box(STEPS, (1,), (0,), steps, written=grid.is_first))
    for i, (weight, parameter) in enumerate(weights):
        (key, _), first_copy = stored_at(weight), _is_first_copy(weight, role)
        whole, flat = (0, parameter.numel()), parameter.data.view(-1)
        boxes += _boxes_of(role, weight, key, whole, flat, written=first_copy and i in own)
        state = states.get(id(parameter))
        if state is None or trained is None:
            continue
        for name, tensor in state.tensors.items():
            written, run = first_copy and (trained.zero1 or i in own), (state.start, state.stop)
            boxes += _boxes_of(role, weight, f"optimizer.state.{name}.{key}", run, tensor, written=written)
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
