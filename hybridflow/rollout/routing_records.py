"""Where the engine's experts of a rollout lie, for a trainer that replays them (`models.routing`).

    keep      from the engine's ranks, which have recorded them, to the ranks of one data-parallel replica of the actor
    settle    the same for a batch that is more, or less, than a rollout: until then records stay where they were made
    move      to other replicas, once, where mini-batches turn out to be others than were planned
    of_rows   for the rows that this replica computes: local, since the rows of a replica are those that it keeps
    portable  to rank 0, for a file; `of_file` does so with rows that are not whole

Until a row is whole, its pieces stay with the ranks that have recorded them: see `RecordedPiece`.

A row stays with one replica in all passes of an iteration, so that the row's record travels once. Which replica that is
follows from the mini-batches, which the seed gives as soon as the batch is known: see `prompt_groups.rows_that_stay`.

A record is (tokens, layers, k). Each rank of the replica that keeps it has the layers of the rank's pipeline stage; no
other rank has anything of it. Rows name their records by numbers, `RolloutBatch.record_ids`, alike on all ranks: so
every rank knows what goes where, and no rank asks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, token_index
from hybridflow.models.prompt_groups import rows_that_stay
from hybridflow.models.routing import RoutingSizes, RowExperts, bits
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.layout import Layout
from hybridflow.rollout.recorded import (
    NO_PARCEL,
    Arrived,
    Parcel,
    Recorded,
    RecordedPiece,
    filled,
    packed,
    sent,
    starts_of,
)

EXPERTS, IDS = "routed_experts", "record_ids"  # in a file; in a batch
Tensors = Mapping[str, Tensor]
# of the prompts of rows (N,) and the iteration: the rows of each mini-batch of each epoch
MiniBatches = Callable[[Tensor, int], Sequence[Sequence[Tensor]]]


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
        of_rollouts: bool = True,
    ) -> None:
        """actor: the layout. replicas: between the ranks that stand alike in the actor's replicas; None outside.

        trainers: the exchange of the ranks that write files, and these ranks; None: all. mini_batches: of a batch;
        None: nobody knows them. of_rollouts: a rollout is a batch; else `settle` tells what is one.
        """
        self.sizes = sizes
        self._actor, self._rank, self._world, self._replicas = actor, rank, world, replicas
        self._trainers, self._mini_batches, self._of_rollouts = trainers, mini_batches, of_rollouts
        self._stages = actor.stages(sizes.num_layers)
        self._at = actor.coordinates(rank) if rank in actor else None
        self._keepers: dict[int, int] = {}  # the replica that keeps a record, by number
        self._kept: dict[int, Tensor] = {}  # (tokens, own layers, k)
        self._waiting: dict[int, Sequence[RecordedPiece]] = {}  # records that no replica keeps yet
        self._made: Recorded | None = None  # who makes records
        self._next = 0
        self._dealt: tuple[Tensor, list[list[int]]] | None = None  # records, and mini-batches that gave their keepers

    def keep(self, batch: RolloutBatch, recorded: Recorded, iteration: int | None = None) -> RolloutBatch:
        """The batch with the records of the rows. Collective over the world.

        iteration: that trains on the batch; None: nobody knows the mini-batches. A row is kept by the replica that
        computes it.
        """
        numbered, self._made = self._numbered(batch), replace(recorded, rows=())
        if not self._of_rollouts and self._trainers is None:  # ranks that only generate take no part in what follows
            self._waiting |= dict(zip(numbered.record_ids.tolist(), recorded.rows, strict=True))
            return numbered
        self._assign(numbered, iteration if self._of_rollouts else None)
        self._deliver(numbered.record_ids.tolist(), batch.lengths.tolist(), recorded)
        return numbered

    def settle(self, batch: RolloutBatch, iteration: int) -> None:
        """The iteration trains on this batch: its records go to the replicas that compute the rows. Collective.

        Over the world; with ranks that only generate over all others.
        """
        assert self._mini_batches is not None, "the mini-batches of a batch are known"
        epochs, ids = self._mini_batches(batch.prompt_indices, iteration), batch.record_ids.tolist()
        lengths, rows = batch.lengths.tolist(), [row for row, number in enumerate(ids) if number in self._waiting]
        if rows and self._made is not None:
            owners, numbers = self._owners(batch, epochs), [ids[row] for row in rows]
            self._keepers |= {ids[row]: owners[row] for row in rows}
            recorded = replace(self._made, rows=[self._waiting.pop(number) for number in numbers])
            self._deliver(numbers, [lengths[row] for row in rows], recorded)
        self.move(batch, epochs)

    def _deliver(self, ids: Sequence[int], lengths: Sequence[int], recorded: Recorded) -> None:
        """Records to their keepers, once. Collective over the world."""
        row_of = [row for row, pieces in enumerate(recorded.rows) for _ in pieces]
        starts = [start for pieces in recorded.rows for start in starts_of(pieces)]
        on_way: dict[tuple[int, int], list[int]] = {}
        for number, piece in enumerate(recorded.pieces):
            on_way.setdefault((piece.made_by, self._keepers[ids[row_of[number]]]), []).append(number)

        def parcel(source: int, target: int) -> Parcel:
            layers = recorded.layers_of(source)
            if not layers or target not in self._actor:
                return NO_PARCEL
            made, kept = recorded.engines.coordinates(source), self._actor.coordinates(target)
            both = set(layers) & set(self._stages[kept.pp])
            return Parcel(on_way.get((made.replica, kept.dp // self._actor.cp), ()), sorted(both))

        for arrived, found in self._sent_pieces(recorded, parcel):
            for number, experts in found.items():
                row = row_of[number]
                self._put(ids[row], experts, arrived.layers, starts[number], lengths[row])

    def of_file(self, recorded: Recorded) -> Tensor | None:
        """On rank 0 (tokens of all pieces, layers, k), elsewhere None. Collective over the world."""
        pieces = recorded.pieces

        def parcel(source: int, target: int) -> Parcel:
            layers = recorded.layers_of(source)
            if target or not layers:
                return NO_PARCEL
            replica = recorded.engines.coordinates(source).replica
            return Parcel([number for number, piece in enumerate(pieces) if piece.made_by == replica], layers)

        arrived = self._sent_pieces(recorded, parcel)
        return None if self._rank else filled(arrived, [piece.num_tokens for piece in pieces], self.sizes)

    def _sent_pieces(self, recorded: Recorded, parcel: Callable[[int, int], Parcel]) -> Arrived:
        pieces, world = recorded.pieces, range(self._world.group.size())
        lengths, every = [piece.num_tokens for piece in pieces], range(self.sizes.num_layers)
        nothing = self.sizes.nothing(0)
        own = {number: nothing if piece.experts is None else piece.experts for number, piece in enumerate(pieces)}
        return sent(
            self._world,
            [packed(own, parcel(self._rank, peer), lengths, every, self.sizes) for peer in world],
            [parcel(peer, self._rank) for peer in world],
            lengths,
            self.sizes,
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
        numbered, of_rows = self._numbered(batch), experts.split(batch.lengths.tolist())
        self._assign(numbered, iteration if self._of_rollouts else None)
        for number, whole in zip(numbered.record_ids.tolist(), of_rows, strict=True):
            if self._is_keeper(self._keepers[number]):
                self._kept[number] = whole[:, list(self._own_layers)]
        return numbered

    def move(self, batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> None:
        """From here on each record is kept by the replica that computes its row in these mini-batches.

        Nothing moves where `keep` or `settle` knew them. epochs: of each the rows of each mini-batch. Collective over
        the ranks that stand alike in the replicas; other ranks that train call it too.
        """
        if self._dealt is not None and _is_dealt(self._dealt, batch, epochs):
            return
        ids, lengths = batch.record_ids.tolist(), batch.lengths.tolist()
        found = {ids[row]: (row, owner) for row, owner in self._owners(batch, epochs).items() if ids[row] >= 0}
        moves = [(row, self._keepers[number], to) for number, (row, to) in found.items() if self._keepers[number] != to]
        if moves and self._at is not None and self._replicas is not None:
            own, replicas, layers = self._at.dp, range(self._actor.dp), self._own_layers

            def parcel(source: int, target: int) -> Parcel:
                (sender, here), (keeper, there) = divmod(source, self._actor.cp), divmod(target, self._actor.cp)
                if here != there:  # ranks that share tokens keep the same records
                    return NO_PARCEL
                return Parcel([row for row, *way in moves if way == [sender, keeper]], layers)

            arrived = sent(
                self._replicas,
                [
                    packed(self._of_rows(ids, parcel(own, peer).rows), parcel(own, peer), lengths, layers, self.sizes)
                    for peer in replicas
                ],
                [parcel(peer, own) for peer in replicas],
                lengths,
                self.sizes,
            )
            for row, *_ in moves:
                self._kept.pop(ids[row], None)
            self._kept |= {ids[row]: experts for _, found in arrived for row, experts in found.items()}
        self._keepers |= {ids[row]: to for row, _, to in moves}
        self._dealt = batch.record_ids, _lists(epochs)

    def keep_only(self, ids: Tensor) -> None:
        """Forget all records but these. Local, and alike on all ranks."""
        alive = set(ids.tolist())
        self._keepers = {number: keeper for number, keeper in self._keepers.items() if number in alive}
        self._kept = {number: kept for number, kept in self._kept.items() if number in alive}
        self._waiting = {number: pieces for number, pieces in self._waiting.items() if number in alive}

    def rows_of_replicas(self, batch: RolloutBatch, some: Sequence[int] | None = None) -> list[list[int]]:
        """Each replica computes the rows that it keeps. Local. some: these rows alone.

        A row without a record goes to the replica that has fewest tokens.
        """
        ids, lengths = batch.record_ids.tolist(), batch.lengths.tolist()
        rows = list(range(len(batch)) if some is None else some)
        parts: list[list[int]] = [[] for _ in range(self._actor.row_shares)]
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

        def parcel(source: int, target: int) -> Parcel:
            if target or source not in self._actor or self._actor.coordinates(source).tp:
                return NO_PARCEL
            at = self._actor.coordinates(source)
            share, place = divmod(at.dp, self._actor.cp)
            if place:
                return NO_PARCEL
            rows = [row for row, number in enumerate(ids) if self._keepers.get(number) == share]
            return Parcel(rows, self._stages[at.pp])

        kept = {row: self._kept[number] for row, number in enumerate(ids) if number in self._kept}
        arrived = sent(
            exchange,
            [packed(kept, parcel(self._rank, peer), lengths, self._own_layers, self.sizes) for peer in ranks],
            [parcel(peer, self._rank) for peer in ranks],
            lengths,
            self.sizes,
        )
        if self._rank == 0:
            portable[EXPERTS] = filled(arrived, lengths, self.sizes)
        waiting = [row for row, number in enumerate(ids) if number in self._waiting]
        if waiting and self._made is not None:
            experts = self.of_file(replace(self._made, rows=[self._waiting[ids[row]] for row in waiting]))
            if experts is not None:
                tokens = token_index(tensors["lengths"], torch.tensor(waiting))
                bits(portable[EXPERTS])[tokens] = bits(experts)
        return portable

    # ---- inside

    @property
    def _own_layers(self) -> tuple[int, ...]:
        return () if self._at is None else self._stages[self._at.pp]

    def _is_keeper(self, replica: int) -> bool:
        return self._at is not None and self._at.dp // self._actor.cp == replica

    def _nothing(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, len(self._own_layers), self.sizes.chosen, dtype=self.sizes.dtype)

    def _of_rows(self, ids: Sequence[int], rows: Sequence[int]) -> dict[int, Tensor]:
        """Records that this rank keeps, by row."""
        for row in rows:
            assert ids[row] in self._kept, f"the record of row {row} lies with replica {self._keepers.get(ids[row])}"
        return {row: self._kept[ids[row]] for row in rows}

    def _numbered(self, batch: RolloutBatch) -> RolloutBatch:
        """With new records, of which nothing is kept yet."""
        self._next += len(batch)
        return replace(batch, record_ids=torch.arange(self._next - len(batch), self._next))

    def _assign(self, batch: RolloutBatch, iteration: int | None) -> None:
        """Keepers of these records, by the mini-batches of the iteration; None: nobody knows them."""
        epochs: Sequence[Sequence[Tensor]] = ()
        if self._mini_batches is not None and iteration is not None:
            epochs = self._mini_batches(batch.prompt_indices, iteration)
        ids = batch.record_ids.tolist()
        self._keepers |= {ids[row]: replica for row, replica in self._owners(batch, epochs).items()}
        self._dealt = batch.record_ids, _lists(epochs)

    def _owners(self, batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> dict[int, int]:
        """By row the replica."""
        parts = rows_that_stay(batch, self._actor.row_shares, epochs)
        return {row: replica for replica, rows in enumerate(parts) for row in rows}


def _lists(epochs: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Of each epoch the rows of its mini-batches, with -1 behind each."""
    return [[row for rows in mini_batches for row in (*rows.tolist(), -1)] for mini_batches in epochs]


def _is_dealt(dealt: tuple[Tensor, list[list[int]]], batch: RolloutBatch, epochs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the keepers of these rows were chosen by these mini-batches, so that nothing has to be dealt again."""
    ids, known = dealt
    return torch.equal(ids, batch.record_ids) and known == _lists(epochs)
