"""What engines have recorded of the experts of rows, and messages of it between ranks.

A message is a parcel: rows, or pieces of rows, and layers. Both ranks know what is in it, so that none asks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.models.routing import RoutingSizes, bits
from hybridflow.parallel.exchange import Exchange


@dataclass(frozen=True)
class RecordedPiece:
    """What one engine replica has recorded of a row: of consecutive tokens.

    A response that was generated at once is one piece, one of a partial rollout has a piece of each segment.

    experts: (tokens, layers, k), zero in the layers of other stages; of the last tokens there may be none. None: this
    rank has recorded nothing of the piece. Where the engine has lost a piece, no rank has: the record is 0 there.
    """

    made_by: int
    num_tokens: int
    experts: Tensor | None


@dataclass(frozen=True)
class Parcel:
    """Rows, or pieces of rows, and layers that go from one rank to another in one message."""

    rows: Sequence[int]
    layers: Sequence[int]


NO_PARCEL = Parcel((), ())
Arrived = list[tuple[Parcel, dict[int, Tensor]]]


def packed(
    there: Mapping[int, Tensor], parcel: Parcel, lengths: Sequence[int], layers: Sequence[int], sizes: RoutingSizes
) -> Tensor:
    """As bytes. layers: those that `there` has. What a row's last tokens lack is 0."""
    known = tuple(layers)
    columns = [known.index(layer) for layer in parcel.layers] if tuple(parcel.layers) != known else slice(None)
    parts = [torch.zeros(0, dtype=sizes.dtype)]
    for row in parcel.rows:
        experts = there[row][:, columns]
        missing = lengths[row] - len(experts)
        parts += [experts.reshape(-1), experts.new_zeros(missing * len(parcel.layers) * sizes.chosen)]
    return torch.cat(parts).view(torch.uint8)


def exchange_parcels(
    exchange: Exchange,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Parcel],
    lengths: Sequence[int],
    sizes: RoutingSizes,
) -> Arrived:
    """Send `outgoing`, receive `incoming`: each parcel with records (tokens, layers, k) by row or piece. Collective."""
    tokens = [sum(lengths[row] for row in parcel.rows) for parcel in incoming]
    per_layer = sizes.chosen * sizes.dtype.itemsize
    num_bytes = [count * len(parcel.layers) * per_layer for count, parcel in zip(tokens, incoming, strict=True)]
    found = []
    for parcel, message in zip(incoming, exchange.swap(outgoing, num_bytes), strict=True):
        if len(message):
            whole = message.view(sizes.dtype).view(-1, len(parcel.layers), sizes.chosen)
            of_rows = whole.split([lengths[row] for row in parcel.rows])
            found.append((parcel, dict(zip(parcel.rows, of_rows, strict=True))))
    return found


def filled(arrived: Arrived, lengths: Sequence[int], sizes: RoutingSizes) -> Tensor:
    """(T, layers, k) of what has come from all stages."""
    whole, ends = sizes.nothing(sum(lengths)), list(accumulate(lengths))
    for parcel, found in arrived:
        for row, experts in found.items():
            bits(whole)[ends[row] - lengths[row] : ends[row], list(parcel.layers)] = bits(experts)
    return whole


def starts_of(pieces: Sequence[RecordedPiece]) -> list[int]:
    """Of each piece of a row its first token."""
    return list(accumulate((piece.num_tokens for piece in pieces), initial=0))[:-1]
