"""Shards of a matrix as rows and columns of the whole, and the rectangles that two of them share. Pure.

The order of rows is megatron's. An engine's tensor-parallel rank holds the same as a training rank would
(`architecture.shards`), except QKV: [the rank's q heads; k heads; v heads]. Where there are fewer key/value heads than
ranks, megatron cuts inside a group and the engine repeats heads.

Of the pieces of a message each large one travels by itself, straight from and into the weights; small ones are packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from hybridflow.architecture.shards import Interval, Matrix, Shard, Split, cached, common, joined, share, training_shard
from hybridflow.architecture.weight import Weight
from hybridflow.parallel.layout import Place


class Piece(NamedTuple):
    """rows x columns at (row, column) of the engine's shard = those at (source_row, source_column) of a training shard.

    A vector's pieces have column 0 and 1 column.
    """

    row: int
    column: int
    source_row: int
    source_column: int
    rows: int
    columns: int

    @property
    def num_elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class View:
    """Where an engine's shard lies in a training shard."""

    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class Arrangement:
    """How an engine's shard is found in one training shard: at `view`, after the row blocks are put in `order`.

    order: the shard's rows as len(order) equal blocks; block i is then the former block order[i]. Empty: as it stands.
    """

    order: tuple[int, ...]
    view: View


# ------------------------------------------------------------------------------------------------------- shards


@cached
def engine_shard(matrix: Matrix, place: Place) -> Shard:
    """What the engine's rank at `place` needs, in the engine's order."""
    if matrix.split is not Split.QKV:
        return training_shard(matrix._replace(split=matrix.engine_split or matrix.split), place)
    tp, tp_rank = place.tp, place.tp_rank
    queries = matrix.num_heads // matrix.num_kv_heads  # of a group
    group, dim = (queries + 2) * matrix.head_dim, matrix.head_dim
    q = [h // queries * group + h % queries * dim for h in range(*share(matrix.num_heads, tp, tp_rank))]
    k = [g * group + queries * dim for g in range(*_kv_heads(matrix.num_kv_heads, tp, tp_rank))]
    starts = [*q, *k, *(start + dim for start in k)]
    return Shard(joined([(start, start + dim) for start in starts]), (0, matrix.columns))


def _kv_heads(num_kv_heads: int, tp: int, tp_rank: int) -> Interval:
    if tp <= num_kv_heads:
        return share(num_kv_heads, tp, tp_rank)
    assert tp % num_kv_heads == 0, f"{tp} ranks cannot repeat {num_kv_heads} key/value heads alike"
    head = tp_rank * num_kv_heads // tp
    return head, head + 1


# ---------------------------------------------------------------------------------------------- two shards


@cached
def pieces_of(matrix: Matrix, training: Place, engine: Place) -> tuple[Piece, ...]:
    """What the training rank has of the engine rank's shard: the fewest rectangles, top down."""
    source, target = training_shard(matrix, training), engine_shard(matrix, engine)
    left, right = common(source.columns, target.columns)
    if left == right:
        return ()
    found: list[Piece] = []
    row = 0
    for wanted in target.rows:
        # training rows ascend in every split, so these pieces do too
        for source_row, start, stop in _overlaps(wanted, source.rows):
            at = (row + start - wanted[0], left - target.columns[0])
            _append(found, Piece(*at, source_row, left - source.columns[0], stop - start, right - left))
        row += wanted[1] - wanted[0]
    return tuple(found)


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece of the same columns, to the last one where it continues that in both shards."""
    last = pieces[-1] if pieces else None
    if last and (last.row + last.rows, last.source_row + last.rows) == (piece.row, piece.source_row):
        pieces[-1] = last._replace(rows=last.rows + piece.rows)
    else:
        pieces.append(piece)


def _overlaps(wanted: Interval, rows: tuple[Interval, ...]) -> list[tuple[int, int, int]]:
    """(row of the shard, global start, global stop) of the wanted rows that a shard of these rows holds."""
    found, offset = [], 0
    for interval in rows:
        start, stop = common(wanted, interval)
        if stop > start:
            found.append((offset + start - interval[0], start, stop))
        offset += interval[1] - interval[0]
    return found


@cached
def overlap_elements(matrix: Matrix, training: Place, engine: Place) -> int:
    """How many elements two such shards share, counted from the intervals alone."""
    source, target = training_shard(matrix, training), engine_shard(matrix, engine)
    pairs = [common(a, b) for a in source.rows for b in target.rows]
    columns = common(source.columns, target.columns)
    return sum(stop - start for start, stop in pairs) * (columns[1] - columns[0])


@cached
def sources_of(matrix: Matrix, training: tuple[Place, ...], near: int, engine: Place) -> tuple[tuple[int, Piece], ...]:
    """(which training place, piece) that make up an engine shard, each element once, by row and column of the target.

    training: all places of a copy. near: which of them to take from what all of them hold.
    """
    places = [near] if matrix.split is Split.REPLICATED else range(len(training))
    found = [(index, piece) for index in places for piece in pieces_of(matrix, training[index], engine)]
    return tuple(sorted(found, key=lambda source: source[1]))


@cached
def arrangement_of(matrix: Matrix, training: Place, engine: Place) -> Arrangement | None:
    """How the engine shard is found in the one training shard; None where that lacks elements."""
    target = engine_shard(matrix, engine)
    pieces = pieces_of(matrix, training, engine)
    if sum(piece.num_elements for piece in pieces) < target.num_elements:
        return None
    first = pieces[0]
    if len(pieces) == 1:
        return Arrangement((), View(first.source_row, first.rows, first.source_column, first.columns))
    order = _order_of(pieces, training_shard(matrix, training).num_rows)
    return Arrangement(order, View(0, target.num_rows, first.source_column, first.columns))


def _order_of(pieces: tuple[Piece, ...], num_rows: int) -> tuple[int, ...]:
    """The order of row blocks, as large as can be, that puts the pieces first and keeps the rest ascending."""
    size = gcd(num_rows, *(piece.source_row for piece in pieces), *(piece.rows for piece in pieces))
    starts = [row for piece in pieces for row in range(piece.source_row, piece.source_row + piece.rows, size)]
    wanted = [row // size for row in starts]
    assert len(set(wanted)) == len(wanted), f"an engine shard needs a row twice: blocks {wanted}"
    return (*wanted, *sorted(set(range(num_rows // size)) - set(wanted)))


ALONE_ELEMENTS = 1 << 14  # from here on a piece travels by itself

WeightPiece = tuple[Weight, Piece]
Parcel = tuple[WeightPiece, ...]  # what is sent at once
Content = tuple[tuple[str, int, int, int, int], ...]  # (weight, source row and column, rows, columns) of each piece


def parcels_of(pieces: Sequence[WeightPiece]) -> list[Parcel]:
    """The pieces of a message as they are sent: the large ones, then the small ones together."""
    small = tuple(piece for piece in pieces if piece[1].num_elements < ALONE_ELEMENTS)
    large: list[Parcel] = [(piece,) for piece in pieces if piece[1].num_elements >= ALONE_ELEMENTS]
    return [*large, small] if small else large


def content(parcel: Parcel) -> Content:
    """What is sent, whoever receives it: alike for two peers that get the same."""
    return tuple((w.megatron, p.source_row, p.source_column, p.rows, p.columns) for w, p in parcel)


def is_sent_in_place(parcel: Parcel, source_columns: int) -> bool:
    """Whether it is one rectangle of neighbouring elements of a training shard with so many columns."""
    return len(parcel) == 1 and (parcel[0][1].columns == source_columns or parcel[0][1].rows == 1)


def is_received_in_place(parcel: Parcel, columns: int) -> bool:
    """Whether it is one rectangle of neighbouring elements of an engine's shard with so many columns."""
    return len(parcel) == 1 and (parcel[0][1].columns == columns or parcel[0][1].rows == 1)
