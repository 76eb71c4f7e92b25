"""Shards of matrices by hand, and the pieces that two shards share."""

from itertools import pairwise, product

import pytest

from hybridflow.architecture.shards import Matrix, Shard, Split, joined, training_shard
from hybridflow.parallel.layout import Cut, Place
from hybridflow.reshard.slices import (
    Arrangement,
    Piece,
    View,
    arrangement_of,
    engine_shard,
    overlap_elements,
    pieces_of,
    sources_of,
)

# 4 query heads in 2 groups, head_dim 10: rows are q0 q1 k0 v0 q2 q3 k1 v1
QKV = Matrix(Split.QKV, 80, 3, num_heads=4, num_kv_heads=2, head_dim=10)
# 4 query heads in 1 group, head_dim 2: rows are q0 q1 q2 q3 k v
SHARED_KV = Matrix(Split.QKV, 12, 1, num_heads=4, num_kv_heads=1, head_dim=2)
GATED = Matrix(Split.GATED, 16, 3)  # gate: rows 0 to 8
COLUMNS = Matrix(Split.COLUMNS, 5, 8)
VOCAB = Matrix(Split.VOCAB, 64, 3)
REPLICATED = Matrix(Split.REPLICATED, 5, 1)
ROWS = Matrix(Split.ROWS, 8, 3)
EXPERTS = Matrix(Split.GATED, 16, 3, experts=2)  # gate and up of 4 rows, twice
AS_IT_STANDS = Matrix(Split.GATED, 8, 3, engine_split=Split.ROWS)


@pytest.mark.parametrize(
    ("matrix", "tp", "tp_rank", "rows", "columns"),
    [
        (QKV, 1, 0, [(0, 80)], (0, 3)),
        (QKV, 2, 1, [(40, 80)], (0, 3)),
        (QKV, 4, 1, [(20, 40)], (0, 3)),
        (SHARED_KV, 4, 1, [(3, 6)], (0, 1)),  # half of q1 and q2
        (GATED, 1, 0, [(0, 16)], (0, 3)),
        (GATED, 2, 1, [(4, 8), (12, 16)], (0, 3)),
        (COLUMNS, 4, 3, [(0, 5)], (6, 8)),
        (VOCAB, 2, 1, [(32, 64)], (0, 3)),
        (REPLICATED, 2, 1, [(0, 5)], (0, 1)),
        (ROWS, 2, 1, [(4, 8)], (0, 3)),
        (EXPERTS, 2, 1, [(2, 4), (6, 8), (10, 12), (14, 16)], (0, 3)),
        (AS_IT_STANDS, 2, 1, [(2, 4), (6, 8)], (0, 3)),
    ],
)
def test_training_shards_by_hand(matrix: Matrix, tp: int, tp_rank: int, rows: list, columns: tuple) -> None:
    shard = training_shard(matrix, Place(tp, tp_rank))
    assert shard == Shard(tuple(rows), columns)
    assert shard.num_rows == sum(stop - start for start, stop in rows)
    assert shard.num_elements == shard.num_rows * (columns[1] - columns[0])


@pytest.mark.parametrize(
    ("matrix", "tp", "tp_rank", "rows"),
    [
        (QKV, 1, 0, [(0, 20), (40, 60), (20, 30), (60, 70), (30, 40), (70, 80)]),
        (QKV, 2, 0, [(0, 40)]),
        (QKV, 2, 1, [(40, 80)]),
        (QKV, 4, 1, [(10, 40)]),  # q1, and k0 v0 like rank 0
        (QKV, 4, 0, [(0, 10), (20, 40)]),
        (SHARED_KV, 2, 0, [(0, 4), (8, 12)]),
        (SHARED_KV, 4, 3, [(6, 12)]),
        (GATED, 2, 1, [(4, 8), (12, 16)]),
        (AS_IT_STANDS, 2, 1, [(4, 8)]),
        (VOCAB, 2, 1, [(32, 64)]),
    ],
)
def test_engine_shards_by_hand(matrix: Matrix, tp: int, tp_rank: int, rows: list) -> None:
    assert engine_shard(matrix, Place(tp, tp_rank)) == Shard(tuple(rows), (0, matrix.columns))


def test_joined_intervals_keep_their_order() -> None:
    assert joined([(4, 6), (6, 7), (0, 2), (2, 4)]) == ((4, 7), (0, 4))


# ------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("matrix", "training", "engine", "pieces"),
    [
        # the engine wants q0 | k0 v0 of q0 q1 k0 v0
        (QKV, (2, 0), (4, 0), [(0, 0, 0, 0, 10, 3), (10, 0, 20, 0, 20, 3)]),
        (QKV, (2, 1), (4, 0), []),
        (QKV, (2, 1), (1, 0), [(20, 0, 0, 0, 20, 3), (50, 0, 20, 0, 10, 3), (70, 0, 30, 0, 10, 3)]),
        # half of q1, q2 for the engine's q0 q1 k v
        (SHARED_KV, (4, 1), (2, 0), [(3, 0, 0, 0, 1, 1)]),
        (GATED, (2, 1), (1, 0), [(4, 0, 0, 0, 4, 3), (12, 0, 4, 0, 4, 3)]),
        (GATED, (2, 1), (2, 1), [(0, 0, 0, 0, 8, 3)]),  # neighbours in both shards, if not in the whole
        (GATED, (2, 1), (4, 2), [(0, 0, 0, 0, 2, 3), (2, 0, 4, 0, 2, 3)]),
        (COLUMNS, (2, 1), (1, 0), [(0, 4, 0, 0, 5, 4)]),
        (COLUMNS, (2, 1), (4, 3), [(0, 0, 0, 2, 5, 2)]),
        (COLUMNS, (2, 0), (4, 3), []),
        (VOCAB, (4, 1), (2, 0), [(16, 0, 0, 0, 16, 3)]),
        (REPLICATED, (2, 1), (4, 3), [(0, 0, 0, 0, 5, 1)]),
    ],
)
def test_pieces_by_hand(matrix: Matrix, training: tuple, engine: tuple, pieces: list[tuple]) -> None:
    assert pieces_of(matrix, Place(*training), Place(*engine)) == tuple(Piece(*piece) for piece in pieces)
    assert overlap_elements(matrix, Place(*training), Place(*engine)) == sum(piece[4] * piece[5] for piece in pieces)


def elements(shard: Shard) -> list[list[tuple[int, int]]]:
    rows = [row for start, stop in shard.rows for row in range(start, stop)]
    return [[(row, column) for column in range(*shard.columns)] for row in rows]


@pytest.mark.parametrize(
    ("place", "rows", "columns"),
    [
        (Place(1, 0, 2, 0), [(0, 8)], (0, 3)),
        (Place(1, 0, 2, 1), [(8, 16)], (0, 3)),
        (Place(2, 1, 2, 1), [(10, 12), (14, 16)], (0, 3)),
    ],
    ids=str,
)
def test_experts_by_hand(place: Place, rows: list, columns: tuple) -> None:
    assert training_shard(EXPERTS, place) == engine_shard(EXPERTS, place) == Shard(tuple(rows), columns)
    wide = Matrix(Split.COLUMNS, 10, 4, experts=2)
    assert training_shard(wide, place).rows == ((place.ep_rank * 5, place.ep_rank * 5 + 5),)


MATRICES = [QKV, SHARED_KV, GATED, COLUMNS, VOCAB, REPLICATED, ROWS, EXPERTS, AS_IT_STANDS]


@pytest.mark.parametrize(("matrix", "tp", "rollout_tp"), [*product(MATRICES, [1, 2, 4], [1, 2, 4])])
def test_pieces_are_the_fewest_that_hold_every_common_element_once(matrix: Matrix, tp: int, rollout_tp: int) -> None:
    for tp_rank, rollout_rank in product(range(tp), range(rollout_tp)):
        held = elements(training_shard(matrix, Place(tp, tp_rank)))
        wanted = elements(engine_shard(matrix, Place(rollout_tp, rollout_rank)))
        pieces = pieces_of(matrix, Place(tp, tp_rank), Place(rollout_tp, rollout_rank))
        found = []
        for piece in pieces:
            for i, j in product(range(piece.rows), range(piece.columns)):
                element = wanted[piece.row + i][piece.column + j]
                assert held[piece.source_row + i][piece.source_column + j] == element
                found.append(element)
        common = {x for row in held for x in row} & {x for row in wanted for x in row}
        assert len(found) == len(common) and set(found) == common
        assert overlap_elements(matrix, Place(tp, tp_rank), Place(rollout_tp, rollout_rank)) == len(common)
        for a, b in pairwise(pieces):
            assert (a.row + a.rows, a.source_row + a.rows) != (b.row, b.source_row), "two pieces could be one"


def test_sources_are_in_the_order_of_the_engine_shard() -> None:
    found = sources_of(QKV, Cut(2).places("dense"), 0, Place(1, 0))
    assert [(tp, piece.row, piece.rows) for tp, piece in found] == [
        *[(0, 0, 20), (1, 20, 20)],
        *[(0, 40, 10), (1, 50, 10), (0, 60, 10), (1, 70, 10)],
    ]
    assert [tp for tp, _ in sources_of(COLUMNS, Cut(4).places("dense"), 0, Place(2, 1))] == [2, 3]
    assert [tp for tp, _ in sources_of(REPLICATED, Cut(4).places("dense"), 2, Place(2, 1))] == [2]  # the near one


# ------------------------------------------------------------------------------------------------- arrangements


@pytest.mark.parametrize(
    ("matrix", "training", "engine", "order", "view"),
    [
        (QKV, (1, 0), (1, 0), (0, 1, 4, 5, 2, 6, 3, 7), View(0, 80, 0, 3)),
        (QKV, (2, 1), (2, 1), (), View(0, 40, 0, 3)),
        (QKV, (1, 0), (2, 1), (), View(40, 40, 0, 3)),  # the second group as it stands
        (QKV, (1, 0), (4, 2), (4, 6, 7, 0, 1, 2, 3, 5), View(0, 30, 0, 3)),  # q2 | k1 v1, and the rest
        (QKV, (1, 0), (4, 3), (), View(50, 30, 0, 3)),  # q3 k1 v1 are neighbours
        (SHARED_KV, (1, 0), (2, 0), (0, 2, 1), View(0, 8, 0, 1)),  # blocks q0 q1, q2 q3, k v
        (SHARED_KV, (1, 0), (2, 1), (), View(4, 8, 0, 1)),
        (GATED, (1, 0), (2, 0), (0, 2, 1, 3), View(0, 8, 0, 3)),
        (GATED, (1, 0), (2, 1), (1, 3, 0, 2), View(0, 8, 0, 3)),
        (GATED, (2, 1), (2, 1), (), View(0, 8, 0, 3)),
        (COLUMNS, (1, 0), (2, 1), (), View(0, 5, 4, 4)),
        (VOCAB, (1, 0), (4, 3), (), View(48, 16, 0, 3)),
        (REPLICATED, (1, 0), (2, 1), (), View(0, 5, 0, 1)),
    ],
)
def test_arrangements_by_hand(matrix: Matrix, training: tuple, engine: tuple, order: tuple, view: View) -> None:
    assert arrangement_of(matrix, Place(*training), Place(*engine)) == Arrangement(order, view)


@pytest.mark.parametrize(
    ("matrix", "training", "engine"),
    [
        (QKV, (2, 0), (1, 0)),
        (QKV, (2, 0), (2, 1)),
        (SHARED_KV, (2, 0), (2, 0)),
        (GATED, (4, 0), (2, 0)),
        (COLUMNS, (2, 0), (4, 2)),
        (VOCAB, (2, 1), (1, 0)),
    ],
)
def test_there_is_no_arrangement_where_elements_are_elsewhere(matrix: Matrix, training: tuple, engine: tuple) -> None:
    assert arrangement_of(matrix, Place(*training), Place(*engine)) is None
