"""Weights between their HuggingFace parts, the whole parameter of megatron, and the shard of a rank."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybridflow.architecture.shards import Matrix, Shard, Split, cached, common, training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight
from hybridflow.parallel.layout import Cut, Place


class Block(NamedTuple):
    """Rows start : start + rows of HuggingFace part `part` are rows row : row + rows of the whole parameter."""

    part: int
    start: int
    row: int
    rows: int


def blocks(weight: Weight, spec: ModelSpec) -> tuple[Block, ...]:
    """Where the rows of the HuggingFace parts lie in the whole parameter, from the first row to the last.

    The rows of an expert's matrices are counted on from those of the expert before. Rows past the vocabulary are in no
    block.
    """
    rows = tuple(shape[0] for shape in weight.shapes(spec))
    return _blocks(rows, spec.num_kv_heads if weight.split is Split.QKV else 1)


@cached
def _blocks(part_rows: Shape, groups: int) -> tuple[Block, ...]:
    sizes = [(part, group, rows // groups) for group in range(groups) for part, rows in enumerate(part_rows)]
    ends = accumulate(size for _, _, size in sizes)
    return tuple(
        Block(part, group * size, end - size, size) for (part, group, size), end in zip(sizes, ends, strict=True)
    )


def matrix_of(weight: Weight, spec: ModelSpec) -> Matrix:
    """The whole parameter, with a padded vocabulary."""
    shapes = weight.shapes(spec)
    columns = prod(shapes[0][1:])
    if weight.split is Split.VOCAB:
        return Matrix(weight.split, spec.padded_vocab_size, columns)
    rows = sum(shape[0] for shape in shapes)
    if weight.split is Split.QKV:
        return Matrix(weight.split, rows, columns, spec.num_query_blocks, spec.num_kv_heads, head_dim=spec.head_dim)
    runs = weight.runs(spec) if weight.split is Split.PARTS and weight.runs is not None else ()
    experts = max(weight.experts, 1)
    return Matrix(weight.split, rows, columns, experts=experts, engine_split=weight.engine_split, runs=runs)


def whole_shape(weight: Weight, spec: ModelSpec) -> Shape:
    """Of the whole megatron parameter with the true vocabulary; (experts, rows, columns) if it belongs to experts."""
    shapes = weight.shapes(spec)
    rows = sum(shape[0] for shape in shapes)
    shape = (rows,) if len(shapes[0]) == 1 else (rows, prod(shapes[0][1:]))
    return (weight.experts, shape[0] // weight.experts, *shape[1:]) if weight.experts else shape


def shard_shape(weight: Weight, spec: ModelSpec, cut: Cut) -> Shape:
    """Of a rank's megatron parameter, alike on all that hold a part."""
    return _shape_at(weight, spec, cut.places(weight.group)[0])


def _shape_at(weight: Weight, spec: ModelSpec, place: Place) -> Shape:
    shard = training_shard(matrix_of(weight, spec), place)
    if len(weight.shapes(spec)[0]) == 1:
        return (shard.num_rows,)
    if weight.experts:
        experts = weight.experts // place.ep
        return (experts, shard.num_rows // experts, shard.num_columns)
    return (shard.num_rows, shard.num_columns)


class TensorFiles(Protocol):
    """Tensors of a checkpoint by their HuggingFace names, whatever files they lie in."""

    def read(self, name: str, shape: Shape, rows: slice, columns: slice) -> Tensor:
        """Rows and columns of the tensor `name`, whose full shape must be `shape`."""


_first_row = attrgetter("row")


class Overlap(NamedTuple):
    """`num_rows` rows from `part_row` of HuggingFace part `part` are those from `shard_row` of a rank's shard."""

    part: int
    part_row: int
    shard_row: int
    num_rows: int


def overlaps(weight: Weight, spec: ModelSpec, shard: Shard) -> Iterator[Overlap]:
    """What of the parts is in a shard, top down."""
    shard_row, table = 0, blocks(weight, spec)
    for interval in shard.rows:
        first = max(bisect_right(table, interval[0], key=_first_row) - 1, 0)  # of hundreds, where there are experts
        for i in range(first, len(table)):
            block = table[i]
            if block.row >= interval[1]:
                break
            start, stop = common(interval, (block.row, block.row + block.rows))
            if stop > start:
                yield Overlap(
                    block.part, block.start + start - block.row, shard_row + start - interval[0], stop - start
                )
        shard_row += interval[1] - interval[0]


def read_shard(files: TensorFiles, weight: Weight, spec: ModelSpec, place: Place) -> Tensor:
    """The megatron shard of one weight at a place, read from slices of the HuggingFace tensors."""
    shard, shapes = training_shard(matrix_of(weight, spec), place), weight.shapes(spec)
    columns = slice(*shard.columns) if len(shapes[0]) == 2 else slice(None)
    pieces = [
        files.read(weight.hf[part], shapes[part], slice(part_row, part_row + count), columns)
        for part, part_row, _, count in overlaps(weight, spec, shard)
    ]
    missing = shard.num_rows - sum(len(piece) for piece in pieces)  # rows past the vocabulary
    if missing:
        pieces.append(torch.zeros(missing, *shapes[0][1:], dtype=pieces[0].dtype if pieces else None))
    return (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(_shape_at(weight, spec, place))


def whole_parts(weight: Weight, shards: list[Tensor], spec: ModelSpec, places: Sequence[Place]) -> list[Tensor]:
    """The HuggingFace parts from the megatron shards at all places."""
    parts = [shards[0].new_empty(shape) for shape in weight.shapes(spec)]
    matrix, num_shards = matrix_of(weight, spec), 1 if weight.split is Split.REPLICATED else len(shards)
    for place, tensor in zip(places[:num_shards], shards[:num_shards], strict=True):
        shard = training_shard(matrix, place)
        rows = tensor if tensor.dim() == 1 else tensor.flatten(0, -2)
        for part, part_row, shard_row, count in overlaps(weight, spec, shard):
            target = parts[part][part_row : part_row + count]
            if target.dim() == 2:
                target = target[:, slice(*shard.columns)]
            target.copy_(rows[shard_row : shard_row + count].view(target.shape))
    return parts
