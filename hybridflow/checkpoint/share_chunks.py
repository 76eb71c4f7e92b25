"""Where a rank's share of a weight lies in the tensor that a checkpoint stores: boxes, as few as can be. Pure.

A rank holds some rows and columns of a weight (`architecture.shards`), row after row in memory. The rank's optimizer
steps a run of these elements: with ZeRO-1 a run that begins and ends anywhere. A run of a matrix is at most three boxes
where the run's rows are neighbours in the whole: the end of a row, whole rows, the beginning of a row. Whole experts
are one box for each run of rows that a rank holds of all experts, however many experts there are.

    stored    (layers, experts, rows, columns), without dimensions that the weight lacks; the vocabulary is padded
"""

from collections.abc import Iterator
from typing import NamedTuple

from hybridflow.architecture.parts import matrix_of
from hybridflow.architecture.shards import Interval, Matrix, common, training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight
from hybridflow.architecture.weights import stored_at
from hybridflow.parallel.layout import Place


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
            for position, row, num_rows, column, num_columns in _boxes(*inner, width):
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


def _boxes(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int, int]]:
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
