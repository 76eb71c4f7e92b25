"""Which rows and columns of a parameter a rank holds. Pure.

A parameter is a matrix of rows x columns, a vector one of 1 column; the experts of a layer stand one below the other.
A part is a tensor of a HuggingFace checkpoint.

    split        parts, top down                          megatron's rank r holds
    REPLICATED   1                                        all
    VOCAB        1 (vocab, hidden)                        rows of r, zero rows past the vocabulary
    ROWS         1 (out, in)                              rows of r
    COLUMNS      1 (out, in) an expert                    columns of r
    GATED        gate, up, or both in one, an expert      of each expert [rows of r of gate; rows of r of up]
    QKV          q, k, v                                  an even share of the rows, which stand per key/value group
                                                          [q of the group; k; v]
    PARTS        any, whose rows are of several runs,     of each expert [rows of r of the first run; of the second;
                 an expert                                ...]

A rank has a run of consecutive experts, and of each of these experts the rank's share of the rows.
"""

from enum import Enum, auto
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from hybridflow.parallel.layout import Place

Interval = tuple[int, int]  # start, stop

cached = lru_cache(maxsize=1 << 16)  # the same few shards are asked for again and again: layers are alike


class Split(Enum):
    REPLICATED = auto()
    VOCAB = auto()
    ROWS = auto()
    COLUMNS = auto()
    GATED = auto()
    QKV = auto()
    PARTS = auto()


class Matrix(NamedTuple):
    """What a whole parameter looks like; all that the shards depend on. The vocabulary is padded."""

    split: Split
    rows: int
    columns: int
    num_heads: int = 0  # the heads, of gates too: QKV alone
    num_kv_heads: int = 0
    head_dim: int = 0
    experts: int = 1
    engine_split: Split | None = None  # where the engine splits otherwise than megatron
    runs: tuple[int, ...] = ()  # how many rows each run of an expert has: PARTS alone


class Shard(NamedTuple):
    """A rank's part of a matrix: these rows, in this order, of these columns."""

    rows: tuple[Interval, ...]
    columns: Interval

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.rows)

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.num_columns


@cached
def training_shard(matrix: Matrix, place: Place) -> Shard:
    """What megatron's rank at `place` holds."""
    experts = share(matrix.experts, place.ep, place.ep_rank)
    each = matrix.rows // matrix.experts
    rows, columns = (experts[0] * each, experts[1] * each), (0, matrix.columns)
    match matrix.split:
        case Split.REPLICATED:
            return Shard((rows,), columns)
        case Split.COLUMNS:
            return Shard((rows,), share(matrix.columns, place.tp, place.tp_rank))
        case Split.GATED:
            half = each // 2
            start, stop = share(half, place.tp, place.tp_rank)
            halves = range(2 * experts[0], 2 * experts[1])
            return Shard(joined([(half * i + start, half * i + stop) for i in halves]), columns)
        case Split.PARTS:
            runs = matrix.runs * (experts[1] - experts[0])
            found = []
            for at, run in zip(accumulate(runs, initial=rows[0]), runs, strict=False):
                start, stop = share(run, place.tp, place.tp_rank)
                found.append((at + start, at + stop))
            return Shard(joined(found), columns)
    return Shard((share(matrix.rows, place.tp, place.tp_rank),), columns)


def share(total: int, parts: int, index: int) -> Interval:
    """Part `index` of `total` things cut into equal parts."""
    assert total % parts == 0, f"{total} cannot be cut into {parts}: {total} = {total // parts} x {parts} + ..."
    size = total // parts
    return index * size, (index + 1) * size


def joined(intervals: list[Interval]) -> tuple[Interval, ...]:
    """The same rows in the same order, in as few intervals as can be."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def common(a: Interval, b: Interval) -> Interval:
    """What both hold; empty intervals have stop = start."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
