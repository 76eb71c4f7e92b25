"""Where the engine's experts of a rollout lie, for a trainer that replays them (`models.routing`).

    keep      from the engine's ranks, which have recorded them, to the ranks of one data-parallel replica of the actor
    of_rows   from these to the replica that computes a row now; a row that is computed where it is kept stays
    portable  to rank 0, for a file

A record is (tokens, layers, k). Each rank of the replica that keeps it has the layers of the rank's pipeline stage; no
other rank has anything of it. Rows name their records by numbers, `RolloutBatch.record_ids`, alike on all ranks: so
every rank knows what goes where, and no rank asks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch, offsets
from hybridflow.models.prompt_groups import replica_rows
from hybridflow.models.routing import RoutingSizes, RowExperts
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages

EXPERTS, IDS = "routed_experts", "record_ids"  # in a file; in a batch
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Recorded:
    """What the engines have recorded of a rollout.

    own: by row what this rank has recorded, (tokens, layers, k), zero in the layers of other stages. made_by: of each
    row the engine replica. stages: the layers of an engine's pipeline stages, of which the first tensor-parallel rank
    records.
    """

    own: Mapping[int, Tensor]
    made_by: Sequence[int]
    engines: RolloutLayout
    stages: Stages


@dataclass(frozen=True)
class _Parcel:
    """Rows and layers that go from one rank to another in one message."""

    rows: Sequence[int]
    layers: Sequence[int]


NO_PARCEL = _Parcel((), ())


class RoutingRecords:
    """Those of this rank. All calls but `take` and `keep_only` are collective; over which ranks, each says."""

    def __init__(
        self,
        sizes: RoutingSizes,
        actor: Layout,
        *,
        rank: int,
        world: Exchange,
        replicas: Exchange | None,
        trainers: tuple[Exchange, Sequence[int]] | None = None,
    ) -> None:
        """actor: the layout. replicas: between the ranks that stand alike in the actor's replicas; None outside.

        trainers: the exchange of the ranks that write files, and these ranks; None: all.
        """
        self.sizes = sizes
        self._actor, self._rank, self._world, self._replicas = actor, rank, world, replicas
        self._trainers, self._trainer_ranks = trainers or (world, range(world.group.size()))
        self._stages = actor.stages(sizes.num_layers)
        self._at = actor.coordinates(rank) if rank in actor else None
        self._keepers: dict[int, int] = {}  # the replica that keeps a record, by number
        self._kept: dict[int, Tensor] = {}  # (tokens, own layers, k)
        self._next = 0

    def keep(self, batch: RolloutBatch, recorded: Recorded) -> RolloutBatch:
        """The batch with the records of the rows. Collective over the world.

        A row is kept by the replica that computes it when the whole batch is computed.
        """
        numbered = self._numbered(batch)
        lengths, ids = batch.lengths.tolist(), numbered.record_ids.tolist()
        engines, world = recorded.engines, range(self._world.group.size())
        rows: dict[tuple[int, int], list[int]] = {}
        for row, made_by in enumerate(recorded.made_by):
            rows.setdefault((made_by, self._keepers[ids[row]]), []).append(row)

        def parcel(source: int, target: int) -> _Parcel:
            if source not in engines or target not in self._actor or engines.coordinates(source).tp:
                return NO_PARCEL
            made, kept = engines.coordinates(source), self._actor.coordinates(target)
            both = set(recorded.stages[made.pp]) & set(self._stages[kept.pp])
            return _Parcel(rows.get((made.replica, kept.dp), ()), sorted(both))

        own = {row: self._filled_up(experts, lengths[row]) for row, experts in recorded.own.items()}
        arrived = self._sent(
            self._world,
            [self._packed(own, parcel(self._rank, peer)) for peer in world],
            [parcel(peer, self._rank) for peer in world],
            lengths,
        )
        for row in [row for (_, keeper), some in rows.items() for row in some if self._is_keeper(keeper)]:
            self._kept[ids[row]] = self._nothing(lengths[row])
        for sent, found in arrived:
            columns = [self._own_layers.index(layer) for layer in sent.layers]
            for row, experts in found.items():
                self._kept[ids[row]][:, columns] = experts
        return numbered

    def take(self, batch: RolloutBatch, experts: Tensor) -> RolloutBatch:
        """The batch with records that every rank has read from a file, of which each keeps a part. Local.

        experts: (T, layers, k).
        """
        numbered, of_rows = self._numbered(batch), experts.split(batch.lengths.tolist())
        for number, whole in zip(numbered.record_ids.tolist(), of_rows, strict=True):
            if self._is_keeper(self._keepers[number]):
                self._kept[number] = whole[:, list(self._own_layers)].clone()
        return numbered

    def keep_only(self, ids: Tensor) -> None:
        """Forget all records but these. Local, and alike on all ranks."""
        alive = set(ids.tolist())
        self._keepers = {number: keeper for number, keeper in self._keepers.items() if number in alive}
        self._kept = {number: kept for number, kept in self._kept.items() if number in alive}

    def of_rows(self, batch: RolloutBatch, rows: Sequence[Sequence[int]]) -> RowExperts:
        """The experts of the rows that this rank's replica computes, in the layers of the rank's stage.

        rows: of each replica those that it computes. Collective over the ranks that stand alike in the replicas; they
        meet where one of them needs what another keeps.
        """
        assert self._at is not None and self._replicas is not None, "a rank outside the actor computes no row"
        ids, lengths, own = batch.record_ids.tolist(), batch.lengths.tolist(), self._at.dp
        wanted = [[row for row in some if ids[row] >= 0] for some in rows]
        kept = {row: self._kept[ids[row]] for some in wanted for row in some if ids[row] in self._kept}
        if any(self._keepers[ids[row]] != dp for dp, some in enumerate(wanted) for row in some):
            replicas, layers = range(len(wanted)), self._own_layers

            def parcel(source: int, target: int) -> _Parcel:
                moved = [row for row in wanted[target] if self._keepers[ids[row]] == source]
                return _Parcel(moved, layers) if source != target else NO_PARCEL

            arrived = self._sent(
                self._replicas,
                [self._packed(kept, parcel(own, peer), layers) for peer in replicas],
                [parcel(peer, own) for peer in replicas],
                lengths,
            )
            kept |= {row: experts for _, found in arrived for row, experts in found.items()}
        starts, parts, filled = torch.zeros(len(batch), dtype=torch.int64), [self._nothing(0)], 0
        for row in rows[own]:
            starts[row], filled = filled, filled + lengths[row]
            parts.append(kept[row] if ids[row] >= 0 else self._nothing(lengths[row]))
        return RowExperts(torch.cat(parts), starts, batch.lengths, self._own_layers)

    def portable(self, tensors: Tensors) -> dict[str, Tensor]:
        """The tensors of a batch as a file has them: on rank 0 (T, layers, k) experts in place of their numbers.

        On other ranks without either. Collective over the ranks that train.
        """
        portable = {name: tensor for name, tensor in tensors.items() if name != IDS}
        if IDS not in tensors:
            return portable
        ids, lengths = tensors[IDS].tolist(), tensors["lengths"].tolist()

        def parcel(source: int, target: int) -> _Parcel:
            if target or source not in self._actor or self._actor.coordinates(source).tp:
                return NO_PARCEL
            at = self._actor.coordinates(source)
            rows = [row for row, number in enumerate(ids) if number >= 0 and self._keepers[number] == at.dp]
            return _Parcel(rows, self._stages[at.pp])

        kept = {row: self._kept[number] for row, number in enumerate(ids) if number in self._kept}
        arrived = self._sent(
            self._trainers,
            [self._packed(kept, parcel(self._rank, peer), self._own_layers) for peer in self._trainer_ranks],
            [parcel(peer, self._rank) for peer in self._trainer_ranks],
            lengths,
        )
        if self._rank == 0:
            whole, starts = self.sizes.nothing(sum(lengths)), offsets(tensors["lengths"]).tolist()
            for sent, found in arrived:
                for row, experts in found.items():
                    whole[starts[row] : starts[row] + lengths[row], list(sent.layers)] = experts
            portable[EXPERTS] = whole
        return portable

    # ---- inside

    @property
    def _own_layers(self) -> tuple[int, ...]:
        return () if self._at is None else self._stages[self._at.pp]

    def _is_keeper(self, replica: int) -> bool:
        return self._at is not None and self._at.dp == replica

    def _nothing(self, num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, len(self._own_layers), self.sizes.chosen, dtype=self.sizes.dtype)

    def _filled_up(self, experts: Tensor, num_tokens: int) -> Tensor:
        """The last token of a row has no record."""
        whole = self.sizes.nothing(num_tokens)
        whole[: len(experts)] = experts
        return whole

    def _numbered(self, batch: RolloutBatch) -> RolloutBatch:
        """With new records, of which nothing is kept yet."""
        ids = torch.arange(self._next, self._next + len(batch))
        self._next += len(batch)
        for replica, rows in enumerate(replica_rows(batch, self._actor.dp)):
            self._keepers |= dict.fromkeys(ids[torch.tensor(rows, dtype=torch.int64)].tolist(), replica)
        return replace(batch, record_ids=ids)

    def _packed(self, there: Mapping[int, Tensor], parcel: _Parcel, layers: Sequence[int] | None = None) -> Tensor:
        """As bytes. layers: those that `there` has; None: all."""
        columns = list(parcel.layers if layers is None else map(layers.index, parcel.layers))
        parts = [there[row][:, columns].flatten() for row in parcel.rows]
        return torch.cat([torch.zeros(0, dtype=self.sizes.dtype), *parts]).view(torch.uint8)

    def _sent(
        self, exchange: Exchange, outgoing: Sequence[Tensor], incoming: Sequence[_Parcel], lengths: Sequence[int]
    ) -> list[tuple[_Parcel, dict[int, Tensor]]]:
        """What arrives: by row (tokens, the parcel's layers, k)."""
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
