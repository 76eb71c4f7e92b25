"""Where the engine's experts of a rollout lie, for a trainer that replays them (`models.routing`).

    keep      from the engine's ranks, which have recorded them, to the ranks of one data-parallel replica of the actor
    move      to other replicas, once, where mini-batches turn out to be others than were planned
    of_rows   for the rows that this replica computes: local, since the rows of a replica are those that it keeps
    portable  to rank 0, for a file; `of_file` does so with rows that are not whole

Until a row is whole, its pieces stay with the ranks that have recorded them: see `RecordedPiece`.

A row stays with one replica in all passes of an iteration, so that the row's record travels once. Which replica that is
follows from the mini-batches, which the seed gives before a token is generated: see `prompt_groups.rows_that_stay`.
Only where the batch is more than one rollout, or a part of one, is it known when the updates begin; then records move.

A record is (tokens, layers, k). Each rank of the replica that keeps it has the layers of the rank's pipeline stage; no
other rank has anything of it. Rows name their records by numbers, `RolloutBatch.record_ids`, alike on all ranks: so
every rank knows what goes where, and no rank asks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.models.prompt_groups import rows_that_stay
from hybridflow.models.routing import RoutingSizes, RowExperts, bits
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages

EXPERTS, IDS = "routed_experts", "record_ids"  # in a file; in a batch
Tensors = Mapping[str, Tensor]
# of the prompts of rows (N,) and the iteration: the rows of each mini-batch of each epoch
MiniBatches = Callable[[Tensor, int], Sequence[Sequence[Tensor]]]


@dataclass(frozen=True)
class RecordedPiece:
    """What one engine replica has recorded of a row: of consecutive tokens.

    experts: (tokens, layers, k), zero in the layers of other stages; of the last tokens there may be none. None: this
    rank has recorded nothing of the piece. Where the engine has lost a piece, no rank has: the record is 0 there.
    """

    made_by: int
    num_tokens: int
    experts: Tensor | None


@dataclass(frozen=True)
class Recorded:
    """What the engines have recorded of rows: of each its pieces, in the order of their tokens.

    A response that was generated at once is one piece, one of a partial rollout has a piece of each segment.
    stages: the layers of an engine's pipeline stages, of which the first tensor-parallel rank records.
    """

    rows: Sequence[Sequence[RecordedPiece]]
    engines: RolloutLayout
    stages: Stages

    @property
    def pieces(self) -> list[RecordedPiece]:
        """Of all rows."""
        return [piece for pieces in self.rows for piece in pieces]

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """Those that the rank records."""
        if rank not in self.engines or self.engines.coordinates(rank).tp:
            return ()
        return tuple(self.stages[self.engines.coordinates(rank).pp])


@dataclass(frozen=True)
class _Parcel:
    """Rows, or pieces of rows, and layers that go from one rank to another in one message."""

    rows: Sequence[int]
    layers: Sequence[int]


NO_PARCEL = _Parcel((), ())
_Arrived = list[tuple[_Parcel, dict[int, Tensor]]]


class RoutingRecords:
    """Those of this rank. `keep`, `move` and `portable` are collective; over which ranks, each says."""

    def __init__(
        self,
        sizes: RoutingSizes,
        actor: Layout,
        *,
        rank: int,
        world: Exchange,
        replicas: Exchange | None,
        trainers: tuple[Exchange, Sequence[int]] | None = None,
        mini_batches: MiniBatches | None = None,
    ) -> None:
        """actor: the layout. replicas: between the ranks that stand alike in the actor's replicas; None outside.

        trainers: the exchange of the ranks that write files, and these ranks; None: all. mini_batches: of a rollout;
        None: they are not known before the updates.
        """
        self.sizes = sizes
        self._actor, self._rank, self._world, self._replicas = actor, rank, world, replicas
        self._trainers, self._mini_batches = trainers, mini_batches
        self._stages = actor.stages(sizes.num_layers)
        self._at = actor.coordinates(rank) if rank in actor else None
        self._keepers: dict[int, int] = {}  # the replica that keeps a record, by number
        self._kept: dict[int, Tensor] = {}  # (tokens, own layers, k)
        self._next = 0
        self._dealt: tuple[Tensor, list[list[int]]] | None = None  # records, and mini-batches that gave their keepers

    def keep(self, batch: RolloutBatch, recorded: Recorded, iteration: int | None = None) -> RolloutBatch:
        """The batch with the records of the rows. Collective over the world.

        iteration: that trains on the batch; None: nobody knows the mini-batches. A row is kept by the replica that
        computes it.
        """
        numbered = self._numbered(batch, iteration)
        lengths, ids = batch.lengths.tolist(), numbered.record_ids.tolist()
        row_of = [row for row, pieces in enumerate(recorded.rows) for _ in pieces]
        starts = [start for pieces in recorded.rows for start in _starts(pieces)]
        on_way: dict[tuple[int, int], list[int]] = {}
        for number, piece in enumerate(recorded.pieces):
            on_way.setdefault((piece.made_by, self._keepers[ids[row_of[number]]]), []).append(number)

        def parcel(source: int, target: int) -> _Parcel:
            layers = recorded.layers_of(source)
            if not layers or target not in self._actor:
                return NO_PARCEL
            made, kept = recorded.engines.coordinates(source), self._actor.coordinates(target)
            both = set(layers) & set(self._stages[kept.pp])
            return _Parcel(on_way.get((made.replica, kept.dp), ()), sorted(both))

        for sent, found in self._sent_pieces(recorded, parcel):
            for number, experts in found.items():
                row = row_of[number]
                self._put(ids[row], experts, sent.layers, starts[number], lengths[row])
        return numbered

    def of_file(self, recorded: Recorded) -> Tensor | None:
        """On rank 0 (tokens of all pieces, layers, k), elsewhere None. Collective over the world."""
        pieces = recorded.pieces

        def parcel(source: int, target: int) -> _Parcel:
            layers = recorded.layers_of(source)
            if target or not layers:
                return NO_PARCEL
            replica = recorded.engines.coordinates(source).replica
            return _Parcel([number for number, piece in enumerate(pieces) if piece.made_by == replica], layers)

        arrived = self._sent_pieces(recorded, parcel)
        return None if self._rank else self._filled(arrived, [piece.num_tokens for piece in pieces])

    def _sent_pieces(self, recorded: Recorded, parcel: Callable[[int, int], _Parcel]) -> _Arrived:
        pieces, world = recorded.pieces, range(self._world.group.size())
        sizes, every, nothing = (
            [piece.num_tokens for piece in pieces],
            range(self.sizes.num_layers),
            self.sizes.nothing(0),
        )
        own = {number: nothing if piece.experts is None else piece.experts for number, piece in enumerate(pieces)}
        return self._sent(
            self._world,
            [self._packed(own, parcel(self._rank, peer), sizes, every) for peer in world],
            [parcel(peer, self._rank) for peer in world],
            sizes,
        )

    def _put(self, number: int, experts: Tensor, layers: Sequence[int], start: int, length: int) -> None:
        """Keep these layers of these tokens of a record, which may come from several ranks."""
        if tuple(layers) == self._own_layers and len(experts) == length:
            self._kept[number] = experts
            return
        if number not in self._kept:
            self._kept[number] = self._nothing(length)
        columns = [self._own_layers.index(layer) for layer in layers]
        bits(self._kept[number])[start : start + len(experts), columns] = bits(experts)

    def take(self, batch: RolloutBatch, experts: Tensor, iteration: int | None = None) -> RolloutBatch:
        """The batch with records that every rank has read from a file, of which each keeps a part. Local.

        experts: (T, layers, k). iteration: as in `keep`.
        """
        numbered, of_rows = self._numbered(batch, iteration), experts.split(batch.lengths.tolist())
        for number, whole in zip(numbered.record_ids.tolist(), of_rows, strict=True):
            if self._is_keeper(self._keepers[number]):
                self._kept[number] = whole[:, list(self._own_layers)]
        return numbered

    def move(self, batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> None:
        """From here on each record is kept by the replica that computes its row in these mini-batches.

        Nothing moves where `keep` knew them. epochs: of each the rows of each mini-batch. Collective over the ranks
        that stand alike in the replicas; other ranks that train call it too.
        """
        if self._dealt is not None and _is_dealt(self._dealt, batch, epochs):
            return
        ids, lengths = batch.record_ids.tolist(), batch.lengths.tolist()
        found = {ids[row]: (row, owner) for row, owner in self._owners(batch, epochs).items() if ids[row] >= 0}
        moves = [(row, self._keepers[number], to) for number, (row, to) in found.items() if self._keepers[number] != to]
        if moves and self._at is not None and self._replicas is not None:
            own, replicas = self._at.dp, range(self._actor.dp)

            def parcel(source: int, target: int) -> _Parcel:
                return _Parcel([row for row, *way in moves if way == [source, target]], self._own_layers)

            arrived = self._sent(
                self._replicas,
                [
                    self._packed(self._of_rows(ids, parcel(own, peer).rows), parcel(own, peer), lengths)
                    for peer in replicas
                ],
                [parcel(peer, own) for peer in replicas],
                lengths,
            )
            for row, *_ in moves:
                self._kept.pop(ids[row], None)
            self._kept |= {ids[row]: experts for _, found in arrived for row, experts in found.items()}
        self._keepers |= {ids[row]: to for row, _, to in moves}

    def keep_only(self, ids: Tensor) -> None:
        """Forget all records but these. Local, and alike on all ranks."""
        alive = set(ids.tolist())
        self._keepers = {number: keeper for number, keeper in self._keepers.items() if number in alive}
        self._kept = {number: kept for number, kept in self._kept.items() if number in alive}

    def rows_of_replicas(self, batch: RolloutBatch, some: Sequence[int] | None = None) -> list[list[int]]:
        """Each replica computes the rows that it keeps. Local. some: these rows alone.

        A row without a record goes to the replica that has fewest tokens.
        """
        ids, lengths = batch.record_ids.tolist(), batch.lengths.tolist()
        rows = list(range(len(batch)) if some is None else some)
        parts: list[list[int]] = [[] for _ in range(self._actor.dp)]
        for row in [row for row in rows if ids[row] >= 0]:
            parts[self._keepers[ids[row]]].append(row)
        loads = [sum(lengths[row] for row in part) for part in parts]
        for row in [row for row in rows if ids[row] < 0]:
            replica = loads.index(min(loads))
            parts[replica].append(row)
            loads[replica] += lengths[row]
        return [sorted(part) for part in parts]

    def of_rows(self, batch: RolloutBatch, rows: Sequence[int]) -> RowExperts:
        """The experts of rows that this rank's replica keeps, in the layers of the rank's stage. Local."""
        ids = batch.record_ids.tolist()
        recorded = self._of_rows(ids, [row for row in rows if ids[row] >= 0])
        return RowExperts(
            {row: recorded.get(row) for row in rows}, self._nothing(0), batch.lengths, layers=self._own_layers
        )

    def portable(self, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors of a batch as a file has them: on rank 0 (T, layers, k) experts in place of their numbers.

        On other ranks without either. Collective over the ranks that train.
        """
        portable = {name: tensor for name, tensor in tensors.items() if name != IDS}
        if IDS not in tensors:
            return portable
        ids, lengths = tensors[IDS].tolist(), tensors["lengths"].tolist()
        exchange, ranks = self._trainers or (self._world, range(self._world.group.size()))

        def parcel(source: int, target: int) -> _Parcel:
            if target or source not in self._actor or self._actor.coordinates(source).tp:
                return NO_PARCEL
            at = self._actor.coordinates(source)
            rows = [row for row, number in enumerate(ids) if number >= 0 and self._keepers[number] == at.dp]
            return _Parcel(rows, self._stages[at.pp])

        kept = {row: self._kept[number] for row, number in enumerate(ids) if number in self._kept}
        arrived = self._sent(
            exchange,
            [self._packed(kept, parcel(self._rank, peer), lengths) for peer in ranks],
            [parcel(peer, self._rank) for peer in ranks],
            lengths,
        )
        if self._rank == 0:
            portable[EXPERTS] = self._filled(arrived, lengths)
        return portable

    def _filled(self, arrived: _Arrived, lengths: Sequence[int]) -> Tensor:
        """(T, layers, k) of what has come from all stages."""
        whole, ends = self.sizes.nothing(sum(lengths)), list(accumulate(lengths))
        for sent, found in arrived:
            for row, experts in found.items():
                bits(whole)[ends[row] - lengths[row] : ends[row], list(sent.layers)] = bits(experts)
        return whole

    # ---- inside

    @property
    def _own_layers(self) -> tuple[int, ...]:
        return () if self._at is None else self._stages[self._at.pp]

    def _is_keeper(self, replica: int) -> bool:
        return self._at is not None and self._at.dp == replica

    def _nothing(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, len(self._own_layers), self.sizes.chosen, dtype=self.sizes.dtype)

    def _of_rows(self, ids: Sequence[int], rows: Sequence[int]) -> dict[int, Tensor]:
        """Records that this rank keeps, by row."""
        for row in rows:
            assert ids[row] in self._kept, f"the record of row {row} lies with replica {self._keepers.get(ids[row])}"
        return {row: self._kept[ids[row]] for row in rows}

    def _numbered(self, batch: RolloutBatch, iteration: int | None) -> RolloutBatch:
        """With new records, of which nothing is kept yet."""
        ids = torch.arange(self._next, self._next + len(batch))
        epochs: Sequence[Sequence[Tensor]] = ()
        if self._mini_batches is not None and iteration is not None:
            epochs = self._mini_batches(batch.prompt_indices, iteration)
        self._keepers |= {self._next + row: replica for row, replica in self._owners(batch, epochs).items()}
        self._next += len(batch)
        self._dealt = ids, _lists(epochs)
        return replace(batch, record_ids=ids)

    def _owners(self, batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> dict[int, int]:
        """By row the replica."""
        parts = rows_that_stay(batch, self._actor.dp, epochs)
        return {row: replica for replica, rows in enumerate(parts) for row in rows}

    def _packed(
        self,
        there: Mapping[int, Tensor],
        parcel: _Parcel,
        lengths: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """As bytes. layers: those that `there` has; None: this rank's. What a row's last tokens lack is 0."""
        known = tuple(self._own_layers if layers is None else layers)
        columns = [known.index(layer) for layer in parcel.layers] if tuple(parcel.layers) != known else slice(None)
        parts = [torch.zeros(0, dtype=self.sizes.dtype)]
        for row in parcel.rows:
            experts = there[row][:, columns]
            missing = lengths[row] - len(experts)
            parts += [experts.reshape(-1), experts.new_zeros(missing * len(parcel.layers) * self.sizes.chosen)]
        return torch.cat(parts).view(torch.uint8)

    def _sent(
        self, exchange: Exchange, outgoing: Sequence[Tensor], incoming: Sequence[_Parcel], lengths: Sequence[int]
    ) -> _Arrived:
        """By row, or by piece, (tokens, the parcel's layers, k)."""
        per_layer = self.sizes.chosen * self.sizes.dtype.itemsize
        tokens = [sum(lengths[row] for row in parcel.rows) for parcel in incoming]
        sizes = [count * len(parcel.layers) * per_layer for count, parcel in zip(tokens, incoming, strict=True)]
        found = []
        for parcel, sent in zip(incoming, exchange.swap(outgoing, sizes), strict=True):
            if len(sent):
                whole = sent.view(self.sizes.dtype).view(-1, len(parcel.layers), self.sizes.chosen)
                of_rows = whole.split([lengths[row] for row in parcel.rows])
                found.append((parcel, dict(zip(parcel.rows, of_rows, strict=True))))
        return found


def _lists(epochs: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Of each epoch the rows of its mini-batches, with -1 behind each."""
    return [[row for rows in mini_batches for row in (*rows.tolist(), -1)] for mini_batches in epochs]


def _is_dealt(dealt: tuple[Tensor, list[list[int]]], batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the keepers of these rows were chosen by these mini-batches, so that nothing has to be dealt again."""
    ids, known = dealt
    return torch.equal(ids, batch.record_ids) and known == _lists(epochs)


def _starts(pieces: Sequence[RecordedPiece]) -> list[int]:
    """Of each piece of a row its first token."""
    return list(accumulate((piece.num_tokens for piece in pieces), initial=0))[:-1]
