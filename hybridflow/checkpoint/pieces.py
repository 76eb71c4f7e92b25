"""Where a rank's share of a weight lies in the tensor that a checkpoint stores: boxes, as few as can be. Pure.

A rank holds some rows and columns of a weight (`architecture.shards`), row after row in its memory, and its optimizer
steps a run of these elements: with ZeRO-1 a run that begins and ends anywhere. A run of a matrix is at most three boxes
where its rows are neighbours in the whole: the end of a row, whole rows, the beginning of a row.

    stored    (layers, experts, rows, columns), without those that the weight does not have; its vocabulary is padded
"""

from collections.abc import Iterator
from typing import NamedTuple

from hybridflow.architecture.parts import matrix_of
from hybridflow.architecture.shards import Interval, Matrix, common, training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weights import Shape, Weight, stored_at


class Piece(NamedTuple):
    """Elements start : start + prod(shape) of a rank's flattened share are this box of the stored tensor."""

    start: int
    shape: Shape  # (rows, columns), or (rows,) of a vector
    offset: Shape  # in the stored tensor, whose leading dimensions have no counterpart in `shape`


def stored_shape(weight: Weight, spec: ModelSpec) -> Shape:
    matrix, (_, layer) = matrix_of(weight, spec), stored_at(weight)
    experts = (weight.experts,) if weight.experts else ()
    layers = () if layer is None else (spec.num_layers,)
    columns = (matrix.columns,) if _is_matrix(weight, spec) else ()
    return (*layers, *experts, matrix.rows // matrix.experts, *columns)


def pieces(weight: Weight, spec: ModelSpec, *, tp: int, tp_rank: int, run: Interval) -> Iterator[Piece]:
    """Of elements run[0] .. run[1] of what tensor-parallel rank `tp_rank` of `tp` holds, in their order."""
    matrix, (_, layer) = matrix_of(weight, spec), stored_at(weight)
    shard, is_matrix = training_shard(matrix, tp, tp_rank), _is_matrix(weight, spec)
    width, expert_rows = shard.num_columns, matrix.rows // matrix.experts
    leading = () if layer is None else (layer,)
    reached = 0  # elements of the share before this interval
    for first, last in _within_experts(shard.rows, matrix):
        start, stop = common((reached, reached + (last - first) * width), run)
        for position, row, num_rows, column, num_columns in _boxes(start - reached, stop - reached, width):
            expert, row_of_expert = divmod(first + row, expert_rows)
            offset = (*leading, *((expert,) if weight.experts else ()), row_of_expert)
            place = reached + position - run[0]
            if is_matrix:
                yield Piece(place, (num_rows, num_columns), (*offset, shard.columns[0] + column))
            else:
                yield Piece(place, (num_rows,), offset)
        reached += (last - first) * width


def _boxes(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(first element, row, rows, column, columns) of elements start .. stop of rows of `width`."""
    while start < stop:
        row, column = divmod(start, width)
        num_rows = (stop - start) // width if column == 0 else 0
        num_columns = width if num_rows else min(stop - start, width - column)
        yield start, row, max(num_rows, 1), column, num_columns
        start += max(num_rows, 1) * num_columns


def _within_experts(rows: tuple[Interval, ...], matrix: Matrix) -> Iterator[Interval]:
    """The same rows in the same order, cut where one expert's end."""
    expert_rows = matrix.rows // matrix.experts
    for start, stop in rows:
        while start < stop:
            end = min(stop, (start // expert_rows + 1) * expert_rows)
            yield start, end
            start = end


def _is_matrix(weight: Weight, spec: ModelSpec) -> bool:
    return len(weight.shapes(spec)[0]) == 2
