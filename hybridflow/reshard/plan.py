"""The reshard plan: how the actor's training shards become the engine's. Pure: no tensors, no torch.distributed.

    alias     the engine's shard lies in the training shard as it stands: the engine's parameter is the trainer's memory
    permute   all elements are on the rank, in another row order: one read and one write in place, undone the same
              way before training goes on
    gather    other ranks hold some: exactly those are received, in buckets; the rest is copied from the own shard

A rank of the training layout receives from the rank's copy of the dense weights, so each copy serves itself, and from
the rank's copy of the experts. Ranks that only generate are dealt out over the copies. What a rank does depends on few
coordinates and many layers are alike: sums over all ranks and weights are counted by kind of weight and by standing,
never one by one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from hybridflow.architecture.shards import training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import is_trained
from hybridflow.parallel.layout import Layout, Place, RolloutCoordinates, RolloutLayout, TrainingCoordinates
from hybridflow.reshard.groups import dealt_origin, engine_stages
from hybridflow.reshard.slices import (
    Arrangement,
    Piece,
    View,
    WeightPiece,
    arrangement_of,
    engine_shard,
    overlap_elements,
    sources_of,
)
from hybridflow.reshard.table import Kind, PlannedWeight, fill_buckets, weight_table

BUCKET_ELEMENTS = 1 << 26
Sources = tuple[tuple[int, Piece], ...]  # (rank, piece)


class Way(Enum):
    ALIAS = "alias"
    PERMUTE = "permute"
    GATHER = "gather"


@dataclass(frozen=True)
class Operation:
    """What happens to one parameter of a rank's engine."""

    weight: Weight
    way: Way
    shape: tuple[int, ...]  # of the engine's shard
    order: tuple[int, ...]  # permute: rows as len(order) equal blocks; block i is then the former block order[i]
    view: View | None  # alias, permute: where the engine's shard lies in the (permuted) training shard
    pieces: Sources  # every element of the engine's shard once
    contains_training_shard: bool  # the rank trains this weight, and the engine shard has all of the training shard


class Outline(NamedTuple):
    """Of an operation what memory depends on."""

    way: Way
    num_elements: int  # of the engine's shard
    contains_training_shard: bool


class Message(NamedTuple):
    """What goes between two ranks in one bucket, in an order that both know."""

    peer: int
    pieces: tuple[WeightPiece, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for _, piece in self.pieces)


class BucketTraffic(NamedTuple):
    """A rank's messages in one bucket, peers ascending."""

    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


class _Standing(NamedTuple):
    """All that a rank's counts depend on."""

    engine: tuple[int, int] | None  # pp, tp
    origin: TrainingCoordinates  # of the like in the first copy of the experts
    trains: bool


class _Counts(NamedTuple):
    engine: int
    overlap: int
    permuted: int
    sources: dict[TrainingCoordinates, int]  # as `_Standing.origin` -> elements of the engine's shards from there


class ReshardPlan:
    """Who sends what to whom; the same on every rank. Made by `plan_reshard`."""

    def __init__(
        self,
        train: Layout,
        rollout: RolloutLayout,
        table: tuple[PlannedWeight, ...],
        bucket_elements: int,
        *,
        two_dtypes: bool = False,
    ) -> None:
        self.train, self.rollout = train, rollout
        self._two_dtypes = two_dtypes
        self._table = table
        self._bucket_elements = bucket_elements
        self._counts: dict[_Standing, _Counts] = {}
        self._outlined: dict[tuple[Kind, _Standing], Outline] = {}

    @cached_property
    def _buckets(self) -> tuple[tuple[PlannedWeight, ...], ...]:
        """Of one dtype each, float32 in any model last; of weights that are trained, or of frozen ones."""
        groups: dict[tuple[bool, bool], list[PlannedWeight]] = defaultdict(list)
        for entry in self._table:
            groups[self._two_dtypes and entry.weight.float32, bool(entry.weight.adapter)].append(entry)
        sorted_groups = [tuple(groups[key]) for key in sorted(groups)]
        filled = (fill_buckets(each, self.train, self.rollout, self._bucket_elements) for each in sorted_groups)
        return tuple(bucket for buckets in filled for bucket in buckets)

    @property
    def buckets(self) -> tuple[tuple[Weight, ...], ...]:
        """The order in which weights travel: each weight once, the same on every rank."""
        return tuple(tuple(entry.weight for entry in bucket) for bucket in self._buckets)

    def trained_weights(self, rank: int) -> tuple[Weight, ...]:
        """The weights that `rank` holds a training shard of, in table order; none outside the training layout."""
        return tuple(entry.weight for entry in self._table if self._trains(rank, entry.kind))

    @cached_property
    def is_in_place(self) -> bool:
        """Whether on every rank the engine's weights lie in the trainer's memory: their addresses then never change."""
        corners = {self._standing(rank) for rank in self._generating}
        return all(
            at.trains
            and at.origin.pp in kind.training
            and arrangement_of(kind.matrix, *self._corner(kind, at.origin, at.engine[1])) is not None
            for at in corners
            for kind in self._kinds
            if at.engine is not None and at.engine[0] in kind.engine
        )

    def _standing(self, rank: int) -> _Standing:
        engine, origin = self._generating.get(rank), self.origin(rank)
        alike = self.train.in_expert_copy(0, origin)
        return _Standing(None if engine is None else (engine.pp, engine.tp), alike, rank in self.train)

    def _corner(self, kind: Kind, origin: TrainingCoordinates, engine_tp: int) -> tuple[Place, Place]:
        """Where a rank stands in training and in the engine, as far as a kind of weight depends on it."""
        return self.train.place(kind.group, origin), self.rollout.place(kind.group, engine_tp)

    def operations(self, rank: int) -> tuple[Operation, ...]:
        """How each of the engine's shards on `rank` comes about, in table order; none outside the rollout."""
        return tuple(self._operation(entry, rank) for entry in self._table if self._generates(rank, entry.kind))

    def outlines(self, rank: int) -> dict[str, Outline]:
        """By megatron's name of the weight: what `operations` say but for the pieces, which take long to find."""
        at = self._standing(rank)
        found: dict[str, Outline] = {}
        for kind, names in self._names.get(-1 if at.engine is None else at.engine[0], {}).items():
            found |= dict.fromkeys(names, self._outline(kind, at, rank))
        return found

    @cached_property
    def _names(self) -> Mapping[int, Mapping[Kind, list[str]]]:
        """By engine stage: megatron's names of the weights that it needs, by kind."""
        found: dict[int, dict[Kind, list[str]]] = {}
        for weight, kind in self._table:
            for stage in kind.engine:
                found.setdefault(stage, {}).setdefault(kind, []).append(weight.megatron)
        return found

    def _outline(self, kind: Kind, at: _Standing, rank: int) -> Outline:
        if (kind, at) not in self._outlined:
            assert at.engine is not None, f"rank {rank} has no engine"
            own, wanted = self._corner(kind, at.origin, at.engine[1])
            trains = self._trains(rank, kind)
            held = training_shard(kind.matrix, own).num_elements
            self._outlined[kind, at] = Outline(
                _way(arrangement_of(kind.matrix, own, wanted) if trains else None),
                engine_shard(kind.matrix, wanted).num_elements,
                trains and overlap_elements(kind.matrix, own, wanted) == held,
            )
        return self._outlined[kind, at]

    def traffic(self, rank: int) -> tuple[BucketTraffic, ...]:
        """What `rank` receives and sends in each bucket. What it has itself is no part of it."""
        return tuple(
            BucketTraffic(self._messages(bucket, rank, self._received), self._messages(bucket, rank, self._sent))
            for bucket in self._buckets
        )

    # ------------------------------------------------------------------------------------------------ counts

    def permuted_elements(self, rank: int) -> int:
        """Of the training shards that are permuted."""
        return self._count(rank).permuted

    def received_elements(self, rank: int) -> int:
        """Of the pieces that other ranks send."""
        sources = self._count(rank).sources
        return sum(sources.values()) - (sources.get(self._standing(rank).origin, 0) if rank in self.train else 0)

    def sources(self, rank: int) -> tuple[TrainingCoordinates, ...]:
        """The training coordinates that the parts of the engine's shards of `rank` come from, `rank`'s own included.

        The coordinates are those in the first copy of the experts.
        """
        return tuple(self._count(rank).sources)

    def sent_elements(self, rank: int) -> int:
        return self._sent_elements[rank]

    def lower_bound(self, rank: int) -> int:
        """What no plan can do without: the engine's shards less what the training shards have of them."""
        counts = self._count(rank)
        return counts.engine - counts.overlap

    def _count(self, rank: int) -> _Counts:
        standing = self._standing(rank)
        if standing not in self._counts:
            self._counts[standing] = self._counted(standing)
        return self._counts[standing]

    def _counted(self, at: _Standing) -> _Counts:
        engine = overlap = permuted = 0
        sources: Counter[TrainingCoordinates] = Counter()
        for kind, number in self._kinds.items():
            trains = at.trains and at.origin.pp in kind.training
            if at.engine is None or at.engine[0] not in kind.engine:
                continue
            own, wanted = self._corner(kind, at.origin, at.engine[1])
            engine += number * engine_shard(kind.matrix, wanted).num_elements
            overlap += trains * number * overlap_elements(kind.matrix, own, wanted)
            if trains and _way(arrangement_of(kind.matrix, own, wanted)) is Way.PERMUTE:
                permuted += number * training_shard(kind.matrix, own).num_elements
            for source, piece in self._sources_of(kind, at.origin, at.engine[1]):
                sources[source] += number * piece.num_elements
        return _Counts(engine, overlap, permuted, sources)

    def _sources_of(
        self, kind: Kind, origin: TrainingCoordinates, engine_tp: int
    ) -> Iterator[tuple[TrainingCoordinates, Piece]]:
        """(where in training, piece) that make up an engine shard of a rank that receives from `origin` first."""
        train, group = self.train, kind.group
        near, wanted = train.place_index(group, origin), self.rollout.place(group, engine_tp)
        stage = origin._replace(pp=_source_stage(kind, origin.pp))
        for index, piece in sources_of(kind.matrix, train.places(group), near, wanted):
            yield train.holder(group, index, stage), piece

    @cached_property
    def _kinds(self) -> Counter[Kind]:
        return Counter(entry.kind for entry in self._table)

    @cached_property
    def _sent_elements(self) -> Counter[int]:
        sent: Counter[int] = Counter()
        for receiver in self._generating:
            standing, sources = self._standing(receiver), self._count(receiver).sources
            copy = self._expert_copy(receiver)
            for source, elements in sources.items():
                sent[self.train.rank_at(self.train.in_expert_copy(copy, source))] += elements
            if receiver in self.train:  # the receiver's own pieces
                sent[receiver] -= sources.get(standing.origin, 0)
        return sent

    # -------------------------------------------------------------------------------------- coordinates

    @cached_property
    def _generating(self) -> dict[int, RolloutCoordinates]:
        return {rank: self.rollout.coordinates(rank) for rank in self.rollout.ranks}

    @cached_property
    def _origins(self) -> dict[int, TrainingCoordinates]:
        """Where in training each rank receives from first: the rank's own coordinates, or dealt ones."""
        dealt = {rank: dealt_origin(engine, self.train, self.rollout) for rank, engine in self._generating.items()}
        return dealt | {rank: self.train.coordinates(rank) for rank in self.train.ranks}

    @cached_property
    def _receivers(self) -> dict[int, list[int]]:
        """The engine ranks that the holders of each copy of the experts serve."""
        found = defaultdict(list)
        for rank in self.rollout.ranks:
            found[self._expert_copy(rank)].append(rank)
        return found

    def _expert_copy(self, rank: int) -> int:
        """The copy of the experts that `rank` receives from."""
        return self.train.copy_index("experts", self.origin(rank))

    def origin(self, rank: int) -> TrainingCoordinates:
        """Where in training `rank` receives from first: the rank's own coordinates, or dealt ones."""
        return self._origins[rank]

    def _trains(self, rank: int, kind: Kind) -> bool:
        return rank in self.train and self.origin(rank).pp in kind.training

    def _generates(self, rank: int, kind: Kind) -> bool:
        return rank in self._generating and self._generating[rank].pp in kind.engine

    # ------------------------------------------------------------------------------ operations, messages

    def _pieces(self, kind: Kind, receiver: int) -> Sources:
        """(source rank, piece) of the engine's shard."""
        sources = self._sources_of(kind, self.origin(receiver), self._generating[receiver].tp)
        return tuple((self.train.rank_at(at), piece) for at, piece in sources)

    def _operation(self, entry: PlannedWeight, rank: int) -> Operation:
        kind, origin, engine = entry.kind, self.origin(rank), self._generating[rank]
        own, wanted = self._corner(kind, origin, engine.tp)
        trains = self._trains(rank, kind)
        found = arrangement_of(kind.matrix, own, wanted) if trains else None
        target, held = engine_shard(kind.matrix, wanted), training_shard(kind.matrix, own)
        return Operation(
            weight=entry.weight,
            way=_way(found),
            shape=(target.num_rows,) if kind.is_vector else (target.num_rows, target.num_columns),
            order=found.order if found else (),
            view=found.view if found else None,
            pieces=self._pieces(kind, rank),
            contains_training_shard=trains and overlap_elements(kind.matrix, own, wanted) == held.num_elements,
        )

    def _messages(
        self, bucket: tuple[PlannedWeight, ...], rank: int, pieces_of: Callable[[Kind, int], Sources]
    ) -> tuple[Message, ...]:
        found: dict[int, list[WeightPiece]] = defaultdict(list)
        for entry in bucket:
            for peer, piece in pieces_of(entry.kind, rank):
                found[peer].append((entry.weight, piece))
        return tuple(Message(peer, tuple(found[peer])) for peer in sorted(found))

    def _received(self, kind: Kind, rank: int) -> Sources:
        """(peer, piece) that `rank` receives of a weight."""
        if not self._generates(rank, kind):
            return ()
        return tuple((source, piece) for source, piece in self._pieces(kind, rank) if source != rank)

    def _sent(self, kind: Kind, rank: int) -> Sources:
        """(peer, piece) that `rank` sends of a weight."""
        if not self._trains(rank, kind):
            return ()
        return tuple(
            (receiver, piece)
            for receiver in self._receivers[self._expert_copy(rank)]
            if receiver != rank and self._generates(receiver, kind)
            for source, piece in self._pieces(kind, receiver)
            if source == rank
        )


def plan_reshard(
    spec: ModelSpec,
    train: Layout,
    rollout: RolloutLayout,
    *,
    bucket_elements: int = BUCKET_ELEMENTS,
    dtype: str = "float32",
    changing: bool = False,
) -> ReshardPlan:
    """The plan from training in `train` to engines in `rollout`, over the same ranks, over others, or partly.

    bucket_elements: what a bucket may add to the engine's memory of any rank, and what it may take of the training
    shards of any; a larger weight has a bucket to itself. dtype: of the model. changing: what later syncs move where
    the engine keeps weights that are frozen.
    Errors: ConfigError where the layers do not fill the engine's stages. Else the layouts must fit the model
    (`check_rollout`, `ModelSpec.check_parallel`).
    """
    stages = train.stages(spec.num_layers), engine_stages(spec.num_layers, train, rollout)
    table = weight_table(spec, *stages)
    if changing:
        table = tuple(entry for entry in table if is_trained(entry.weight, spec))
    return ReshardPlan(train, rollout, table, bucket_elements, two_dtypes=dtype != "float32")


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order that undoes `order`."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _source_stage(kind: Kind, near: int) -> int:
    """The training stage to take a weight from: the receiver's own, or by turns where two hold it (tied embedding)."""
    return near if near in kind.training else kind.training[near % len(kind.training)]


def _way(found: Arrangement | None) -> Way:
    if found is None:
        return Way.GATHER
    return Way.PERMUTE if found.order else Way.ALIAS
