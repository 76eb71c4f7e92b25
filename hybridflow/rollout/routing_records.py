"""Where the engine's experts of a rollout lie, for a trainer that replays them (`models.routing`).

    add       numbers the records of a rollout's rows, and sends them where the rollout is the batch; else the pieces
              stay with the ranks that have recorded them
    send      from there, or from another replica, to the ranks of the actor's replica that computes the row in the
              mini-batches of the chosen batch
    of_rows   for the rows that this replica computes: local, since the rows of a replica are those that it keeps
    portable  to rank 0, for a file; `of_file` does so with rows that have not ended

A row stays with one replica in all passes of an iteration, so that the row's record travels once. Which replica that is
follows from the mini-batches, which the seed gives as soon as the batch is known: see `prompt_groups.rows_that_stay`.

A record is (tokens, layers, k). Each rank of the replica that keeps it has the layers of the rank's pipeline stage; no
other rank has anything of it. Rows name their records by numbers, `RolloutBatch.record_ids`, alike on all ranks: so
every rank knows what goes where, and no rank asks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, token_index
from hybridflow.models.prompt_groups import rows_that_stay
from hybridflow.models.routing import RoutingSizes, RowExperts, bits
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages
from hybridflow.rollout.recorded import (
    NO_PARCEL,
    Arrived,
    Parcel,
    RecordedPiece,
    exchange_parcels,
    filled,
    packed,
    starts_of,
)

EXPERTS, IDS = "routed_experts", "record_ids"  # in a file; in a batch
Tensors = Mapping[str, Tensor]
# of the prompts of rows (N,) and the iteration: the rows of each mini-batch of each epoch
MiniBatches = Callable[[Tensor, int], Sequence[Sequence[Tensor]]]


@dataclass
class _Record:
    """Of a row. pieces: what engines have recorded; none once a replica of the actor keeps the record.

    keeper: that replica. experts: (tokens, own layers, k) on the ranks of the keeper.
    """

    pieces: Sequence[RecordedPiece] = ()
    keeper: int | None = None
    experts: Tensor | None = None


class RoutingRecords:
    """Those of this rank. `add`, `send`, `of_file` and `portable` are collective; over which ranks, each says."""

    def __init__(
        self,
        sizes: RoutingSizes,
        actor: Layout,
        *,
        rank: int,
        world: Exchange,
        replicas: Exchange | None,
        engines: tuple[RolloutLayout, Stages] | None = None,
        trainers: tuple[Exchange, Sequence[int]] | None = None,
        mini_batches: MiniBatches | None = None,
        of_rollouts: bool = True,
    ) -> None:
        """actor: the layout. replicas: between the ranks that stand alike in copies of the weights; None outside.

        engines: that record, and the layers of an engine's pipeline stages, of which the first tensor-parallel rank
        records; None: all records are of files. trainers: the exchange of the ranks that write files, and these ranks;
        None: all. mini_batches: of a batch; None: nobody knows them. of_rollouts: a rollout is a batch.
        """
        self.sizes = sizes
        self._actor, self._rank, self._world, self._replicas = actor, rank, world, replicas
        self._engines, self._trainers = engines, trainers
        self._mini_batches, self._of_rollouts = mini_batches, of_rollouts
        self._stages = actor.stages(sizes.num_layers)
        self._at = actor.coordinates(rank) if rank in actor else None
        self._records: dict[int, _Record] = {}  # by number
        self._next = 0
        self._dealt: tuple[Tensor, list[list[int]]] | None = None  # records, and mini-batches that gave their keepers

    @property
    def recorder(self) -> int | None:
        """The engine replica of which this rank records experts."""
        replica, layers = self._made(self._rank)
        return replica if layers else None

    def add(self, batch: RolloutBatch, rows: Sequence[Sequence[RecordedPiece]], iteration: int) -> RolloutBatch:
        """The batch with records of these pieces, by row in the order of their tokens. Collective over the world.

        The pieces go to their keepers if the rollout is the iteration's batch, or if the engine's ranks do not come to
        a later `send`. Otherwise the call is local.
        """
        numbered = self._numbered(batch, [_Record(pieces) for pieces in rows])
        if self._of_rollouts:
            self.send(numbered, iteration)
        elif self._trainers is not None:
            self._send(numbered, ())
        return numbered

    def send(self, batch: RolloutBatch, iteration: int, epochs: Sequence[Sequence[Tensor]] | None = None) -> None:
        """Each record goes to the replica that computes its row in these mini-batches, unless it is there. Collective.

        Over the world where engines have pieces; else over the ranks that stand alike in the replicas, and other ranks
        that train call it too. epochs: of each the rows of each mini-batch; None: those of the iteration, if known.
        """
        if batch.record_ids is None:
            return
        if epochs is None:
            epochs = () if self._mini_batches is None else self._mini_batches(batch.prompt_indices, iteration)
        if self._dealt is None or not _is_dealt(self._dealt, batch.record_ids, epochs):
            self._send(batch, epochs)

    def _send(self, batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> None:
        assert batch.record_ids is not None, "rows have records"
        ids, lengths, owners = batch.record_ids.tolist(), batch.lengths.tolist(), self._owners(batch, epochs)
        rows = [row for row, number in enumerate(ids) if number >= 0]
        waiting = [row for row in rows if self._records[ids[row]].keeper is None]
        moves = {
            row: (keeper, owners[row])
            for row in rows
            if (keeper := self._records[ids[row]].keeper) is not None and keeper != owners[row]
        }
        for row in (*waiting, *moves):
            self._records[ids[row]].keeper = owners[row]
        if waiting:
            self._deliver([ids[row] for row in waiting], [lengths[row] for row in waiting])
        if moves and self._at is not None and self._replicas is not None:
            self._move(ids, lengths, moves)
        self._dealt = batch.record_ids, _lists(epochs)

    def _deliver(self, ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Records to their keepers, once. Collective over the world."""
        rows = [self._records[number].pieces for number in ids]
        row_of = [row for row, pieces in enumerate(rows) for _ in pieces]
        starts = [start for pieces in rows for start in starts_of(pieces)]
        all_pieces = [piece for pieces in rows for piece in pieces]
        on_way: dict[tuple[int, int | None], list[int]] = {}
        for number, piece in enumerate(all_pieces):
            on_way.setdefault((piece.made_by, self._records[ids[row_of[number]]].keeper), []).append(number)

        def parcel(source: int, target: int) -> Parcel:
            replica, layers = self._made(source)
            if not layers or target not in self._actor:
                return NO_PARCEL
            kept = self._actor.coordinates(target)
            both = set(layers) & set(self._stages[kept.pp])
            return Parcel(on_way.get((replica, kept.dp), ()), sorted(both))

        for arrived, found in self._sent_pieces(all_pieces, parcel):
            for number, experts in found.items():
                row = row_of[number]
                self._put(self._records[ids[row]], experts, arrived.layers, starts[number], lengths[row])
        for number in ids:
            self._records[number].pieces = ()

    def of_file(self, rows: Sequence[Sequence[RecordedPiece]]) -> Tensor | None:
        """On rank 0 (tokens of all pieces, layers, k), elsewhere None. Collective over the world."""
        all_pieces = [piece for pieces in rows for piece in pieces]

        def parcel(source: int, target: int) -> Parcel:
            replica, layers = self._made(source)
            if target or not layers:
                return NO_PARCEL
            return Parcel([number for number, piece in enumerate(all_pieces) if piece.made_by == replica], layers)

        arrived = self._sent_pieces(all_pieces, parcel)
        return None if self._rank else filled(arrived, [piece.num_tokens for piece in all_pieces], self.sizes)

    def _sent_pieces(self, pieces: Sequence[RecordedPiece], parcel: Callable[[int, int], Parcel]) -> Arrived:
        lengths, every = [piece.num_tokens for piece in pieces], range(self.sizes.num_layers)
        world = range(self._world.group.size())
        nothing = self.sizes.nothing(0)
        own = {number: nothing if piece.experts is None else piece.experts for number, piece in enumerate(pieces)}
        return exchange_parcels(
            self._world,
            [packed(own, parcel(self._rank, peer), lengths, every, self.sizes) for peer in world],
            [parcel(peer, self._rank) for peer in world],
            lengths,
            self.sizes,
        )

    def _made(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """The engine replica of which the rank records experts, and the layers; nothing without layers."""
        if self._engines is None or rank not in self._engines[0]:
            return 0, ()
        engines, stages = self._engines
        at = engines.coordinates(rank)
        return at.replica, () if at.tp else tuple(stages[at.pp])

    def _put(self, record: _Record, experts: Tensor, layers: Sequence[int], start: int, length: int) -> None:
        """Keep these layers of these tokens of a record, which may come from several ranks."""
        if tuple(layers) == self._own_layers and len(experts) == length:
            record.experts = experts
            return
        if record.experts is None:
            record.experts = self._nothing(length)
        columns = [self._own_layers.index(layer) for layer in layers]
        bits(record.experts)[start : start + len(experts), columns] = bits(experts)

    def take(self, batch: RolloutBatch, experts: Tensor, iteration: int | None = None) -> RolloutBatch:
        """The batch with records that every rank has read from a file, of which each keeps a part. Local.

        experts: (T, layers, k). iteration: that trains on the batch; None: nobody knows the mini-batches.
        """
        epochs: Sequence[Sequence[Tensor]] = ()
        if self._mini_batches is not None and iteration is not None and self._of_rollouts:
            epochs = self._mini_batches(batch.prompt_indices, iteration)
        owners, parts = self._owners(batch, epochs), experts.split(batch.lengths.tolist())
        numbered = self._numbered(batch, [_Record(keeper=owners[row]) for row in range(len(batch))])
        assert numbered.record_ids is not None, "they are given above"
        for row, record in self._by_row(numbered.record_ids):
            if self._is_keeper(owners[row]):
                record.experts = parts[row][:, list(self._own_layers)]
        self._dealt = numbered.record_ids, _lists(epochs)
        return numbered

    def _move(self, ids: Sequence[int], lengths: Sequence[int], moves: Mapping[int, tuple[int, int]]) -> None:
        """Between replicas. moves: by row. Collective over the ranks that stand alike in the replicas."""
        assert self._at is not None and self._replicas is not None, "a rank of the actor"
        own, layers = self._actor.copy_index("dense", self._at), self._own_layers
        copies = range(self._actor.copies("dense"))

        def parcel(source: int, target: int) -> Parcel:
            (sender, here), (keeper, there) = divmod(source, self._actor.cp), divmod(target, self._actor.cp)
            if here != there:  # ranks that share tokens keep the same records
                return NO_PARCEL
            return Parcel([row for row, way in moves.items() if way == (sender, keeper)], layers)

        arrived = exchange_parcels(
            self._replicas,
            [
                packed(self._of_rows(ids, parcel(own, peer).rows), parcel(own, peer), lengths, layers, self.sizes)
                for peer in copies
            ],
            [parcel(peer, own) for peer in copies],
            lengths,
            self.sizes,
        )
        for row in moves:
            self._records[ids[row]].experts = None
        for _, found in arrived:
            for row, experts in found.items():
                self._records[ids[row]].experts = experts

    def keep_only(self, ids: Tensor) -> None:
        """Forget all records but these. Local, and alike on all ranks."""
        alive = set(ids.tolist())
        self._records = {number: record for number, record in self._records.items() if number in alive}

    def rows_of_replicas(self, batch: RolloutBatch, some: Sequence[int] | None = None) -> list[list[int]] | None:
        """Each replica computes the rows that it keeps; None of a batch without records. Local. some: these rows alone.

        A row without a record goes to the replica that has fewest tokens.
        """
        if batch.record_ids is None:
            return None
        ids, lengths = batch.record_ids.tolist(), batch.lengths.tolist()
        rows = list(range(len(batch)) if some is None else some)
        parts: list[list[int]] = [[] for _ in range(self._actor.dp)]
        for row in [row for row in rows if ids[row] >= 0]:
            keeper = self._records[ids[row]].keeper
            assert keeper is not None, f"nobody has sent the record of row {row}"
            parts[keeper].append(row)
        loads = [sum(lengths[row] for row in part) for part in parts]
        for row in [row for row in rows if ids[row] < 0]:
            replica = loads.index(min(loads))
            parts[replica].append(row)
            loads[replica] += lengths[row]
        return [sorted(part) for part in parts]

    def of_rows(self, batch: RolloutBatch, rows: Sequence[int]) -> RowExperts | None:
        """The experts of rows that this rank's replica keeps, in the layers of the rank's stage. Local.

        None of a batch without records. The branches of a row (`RolloutBatch.by_branch`) share the row's record.
        """
        if batch.record_ids is None:
            return None
        ids, lengths = batch.record_ids.tolist(), batch.lengths.tolist()
        starts = _starts_in_records(ids, lengths)
        recorded = self._of_rows(ids, [row for row in rows if ids[row] >= 0])
        parts = {}
        for row, experts in recorded.items():
            start = starts[row] % max(len(experts), 1)  # a batch may have a row more than once
            parts[row] = experts[start : start + lengths[row]]
        return RowExperts(
            {row: parts.get(row) for row in rows}, self._nothing(0), batch.lengths, layers=self._own_layers
        )

    def portable(self, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors of a batch as a file has them: on rank 0 (T, layers, k) experts in place of their numbers.

        On other ranks without either. Collective over the ranks that train.
        """
        portable = {name: tensor for name, tensor in tensors.items() if name != IDS}
        if IDS not in tensors:
            return portable
        lengths, found = tensors["lengths"].tolist(), dict(self._by_row(tensors[IDS]))
        exchange, ranks = self._trainers or (self._world, range(self._world.group.size()))

        def parcel(source: int, target: int) -> Parcel:
            at = self._actor.coordinates(source) if source in self._actor else None
            if target or at is None or at.tp or at.cp:
                return NO_PARCEL
            return Parcel([row for row, record in found.items() if record.keeper == at.dp], self._stages[at.pp])

        kept = {row: record.experts for row, record in found.items() if record.experts is not None}
        arrived = exchange_parcels(
            exchange,
            [packed(kept, parcel(self._rank, peer), lengths, self._own_layers, self.sizes) for peer in ranks],
            [parcel(peer, self._rank) for peer in ranks],
            lengths,
            self.sizes,
        )
        if self._rank == 0:
            portable[EXPERTS] = filled(arrived, lengths, self.sizes)
        waiting = {row: record.pieces for row, record in found.items() if record.pieces}
        if waiting:
            experts = self.of_file(list(waiting.values()))
            if experts is not None:
                tokens = token_index(tensors["lengths"], torch.tensor(list(waiting)))
                bits(portable[EXPERTS])[tokens] = bits(experts)
        return portable

    # ---- inside

    @property
    def _own_layers(self) -> tuple[int, ...]:
        return () if self._at is None else self._stages[self._at.pp]

    def _is_keeper(self, replica: int) -> bool:
        return self._at is not None and self._at.dp == replica

    def _nothing(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, len(self._own_layers), self.sizes.chosen, dtype=self.sizes.dtype)

    def _by_row(self, ids: Tensor) -> Iterator[tuple[int, _Record]]:
        """Rows that have a record."""
        return ((row, self._records[number]) for row, number in enumerate(ids.tolist()) if number >= 0)

    def _of_rows(self, ids: Sequence[int], rows: Sequence[int]) -> dict[int, Tensor]:
        """Experts that this rank keeps, by row."""
        found = {}
        for row in rows:
            record = self._records[ids[row]]
            assert record.experts is not None, f"the record of row {row} lies with replica {record.keeper}"
            found[row] = record.experts
        return found

    def _numbered(self, batch: RolloutBatch, records: Sequence[_Record]) -> RolloutBatch:
        """With these records, by row."""
        ids = range(self._next, self._next + len(batch))
        self._next += len(batch)
        self._records |= dict(zip(ids, records, strict=True))
        return replace(batch, record_ids=torch.tensor(ids))

    def _owners(self, batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> dict[int, int]:
        """By row the replica."""
        parts = rows_that_stay(batch, self._actor.dp, epochs)
        return {row: replica for replica, rows in enumerate(parts) for row in rows}


def _starts_in_records(ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The first token of each row in the row's record: 0 but for further branches of a row."""
    starts, known = list[int](), dict[int, int]()
    for number, length in zip(ids, lengths, strict=True):
        starts.append(known.get(number, 0) if number >= 0 else 0)
        known[number] = starts[-1] + length
    return starts


def _lists(epochs: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Of each epoch the rows of its mini-batches, with -1 behind each."""
    return [[row for rows in mini_batches for row in (*rows.tolist(), -1)] for mini_batches in epochs]


def _is_dealt(dealt: tuple[Tensor, list[list[int]]], ids: Tensor, epochs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the keepers of these rows were chosen by these mini-batches, so that nothing has to be dealt again."""
    its, known = dealt
    return torch.equal(its, ids) and known == _lists(epochs)
