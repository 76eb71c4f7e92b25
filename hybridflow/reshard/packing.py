"""How the pieces of a message travel: each large one by itself, straight from and into the weights; the small ones
packed together. Pure; both sides know the same.
"""

from collections.abc import Sequence

from hybridflow.architecture.weight import Weight
from hybridflow.reshard.slices import Piece

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
