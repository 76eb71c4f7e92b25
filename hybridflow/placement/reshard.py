"""Ways and memory of every rank's reshard, forecast from a plan. Pure: `reshard.execute` replayed on sizes.

The training storages are cut as megatron fills buckets, without padding: an estimate of what is released when.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from hybridflow.architecture.parts import shard_shape
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weights import frozen_weights
from hybridflow.parallel.layout import Layout, RolloutLayout, TrainingCoordinates
from hybridflow.reshard.plan import Operation, Outline, ReshardPlan, Way
from hybridflow.reshard.slices import (
    Content,
    Parcel,
    WeightPiece,
    content,
    is_received_in_place,
    is_sent_in_place,
    parcels_of,
)

SCRATCH_BYTES = 1 << 18  # of a permutation on a CPU, at most; on CUDA it needs none
ALIGNMENT = 64  # elements: where weights begin in the engine's own memory


@dataclass(frozen=True)
class ReshardMemory:
    """Bytes of weights on one rank that come and go when the engine takes over."""

    own: int  # the engine's own
    released: int  # training storages whose content the engine then holds
    peak_extra: int  # beyond the larger of before and after, on the way there or back


class _Local(NamedTuple):
    """What the reshard means to a rank, whichever replica it is in."""

    operations: dict[str, Operation]
    held: tuple[tuple[str, int], ...]  # (weight, elements) of the training shards
    received: dict[tuple[int, TrainingCoordinates], tuple[Parcel, ...]]  # (bucket, source as in `_Kind`) -> parcels
    receive_buffers: Counter[int]  # bucket -> elements


# of a rank: all that a _Local depends on; where in training: of the like in the first copy of the experts
_Kind = tuple[bool, TrainingCoordinates, tuple[int, ...] | None]


class ReshardForecast:
    """Ways and memory of every rank's reshard. Ranks alike but for their replica are computed once."""

    def __init__(self, plan: ReshardPlan, spec: ModelSpec, *, itemsize: int, bucket_elements: int) -> None:
        self._plan, self._spec, self._itemsize, self._bucket_elements = plan, spec, itemsize, bucket_elements
        self._frozen = frozen_weights(spec, "lm")
        self._bucket = {weight.megatron: i for i, bucket in enumerate(plan.buckets) for weight in bucket}
        self._locals: dict[_Kind, _Local] = {}
        self.ranks = sorted({*plan.train.ranks, *plan.rollout.ranks})
        self._local_of = {rank: self._local(rank) for rank in self.ranks}

    @cached_property
    def ways(self) -> dict[Way, tuple[int, int]]:
        """(number of parameters, bytes of the engine's shards) that come about so, summed over the ranks."""
        numbers: Counter[Way] = Counter()
        sizes: Counter[Way] = Counter()
        for key, count in Counter(self._key(rank) for rank in self.ranks).items():
            for operation in self._locals[key].operations.values():
                numbers[operation.way] += count
                sizes[operation.way] += count * self._itemsize * prod(operation.shape)
        return {way: (numbers[way], sizes[way]) for way in Way}

    @cached_property
    def memory(self) -> dict[int, ReshardMemory]:
        known: dict[tuple[_Kind, tuple[int, ...]], ReshardMemory] = {}
        found = {}
        for rank in self.ranks:
            sent = tuple(sum(self._send_buffers[rank][bucket].values()) for bucket in range(len(self._plan.buckets)))
            key = (self._key(rank), sent)
            if key not in known:
                known[key] = self._memory(self._local_of[rank], sent)
            found[rank] = known[key]
        return found

    def _key(self, rank: int) -> _Kind:
        """All that `_Local` depends on: where it receives from first, the place in the engine."""
        origin, rollout = self._plan.origin(rank), self._plan.rollout
        engine = rollout.coordinates(rank)[1:] if rank in rollout else None
        return rank in self._plan.train, self._plan.train.in_expert_copy(0, origin), engine

    def _local(self, rank: int) -> _Local:
        key = self._key(rank)
        if key not in self._locals:
            train = self._plan.train
            operations = {o.weight.megatron: o for o in self._plan.operations(rank)}
            pieces: dict[tuple[int, TrainingCoordinates], list[WeightPiece]] = defaultdict(list)
            for name, operation in operations.items():
                for source, piece in operation.pieces:
                    if source != rank:
                        at = train.in_expert_copy(0, train.coordinates(source))
                        pieces[self._bucket[name], at].append((operation.weight, piece))
            received = {key: tuple(parcels_of(found)) for key, found in pieces.items()}
            buffers: Counter[int] = Counter()
            for (bucket, *_), parcels in received.items():
                buffers[bucket] += sum(_elements(parcel) for parcel in parcels if not self._lands(parcel, operations))
            weights = self._plan.trained_weights(rank)
            held = tuple((w.megatron, prod(shard_shape(w, self._spec, train.cut))) for w in weights)
            self._locals[key] = _Local(operations, held, received, buffers)
        return self._locals[key]

    def _lands(self, parcel: Parcel, operations: Mapping[str, Operation]) -> bool:
        shape = operations[parcel[0][0].megatron].shape
        return is_received_in_place(parcel, shape[1] if len(shape) == 2 else 1)

    @cached_property
    def _send_buffers(self) -> Mapping[int, Mapping[int, dict[Content, int]]]:
        """rank -> bucket -> what it must pack to send -> elements; what several peers get is packed once."""
        found: dict[int, dict[int, dict[Content, int]]] = defaultdict(lambda: defaultdict(dict))
        packed: dict[tuple[_Kind, int, TrainingCoordinates], list[tuple[Content, int]]] = {}
        train = self._plan.train
        for rank in self.ranks:
            copy = train.copy_index("experts", self._plan.origin(rank))
            for (bucket, source), parcels in self._local_of[rank].received.items():
                key = (self._key(rank), bucket, source)
                if key not in packed:
                    packed[key] = [
                        (content(parcel), _elements(parcel)) for parcel in parcels if not self._is_whole(parcel)
                    ]
                found[train.rank_at(train.in_expert_copy(copy, source))][bucket].update(packed[key])
        return found

    def _is_whole(self, parcel: Parcel) -> bool:
        shape = shard_shape(parcel[0][0], self._spec, self._plan.train.cut)
        return is_sent_in_place(parcel, shape[-1] if len(shape) > 1 else 1)

    def _memory(self, local: _Local, sent: tuple[int, ...]) -> ReshardMemory:
        storages = _cut(tuple(reversed(local.held)), self._bucket_elements, alone=self._frozen)
        released = [i for i, storage in enumerate(storages) if _is_released(storage, local.operations)]
        moved = {name for i in released for name, _ in storages[i]}
        own: list[tuple[list[str], int]] = [([], 0) for _ in sent]
        scratch = 0
        for name, operation in local.operations.items():
            if operation.way is Way.GATHER or name in moved:
                names, size = own[self._bucket[name]]
                aligned = -(-prod(operation.shape) // ALIGNMENT) * ALIGNMENT
                own[self._bucket[name]] = ([*names, name], size + self._itemsize * aligned)
            elif operation.way is Way.PERMUTE:
                block = self._itemsize * dict(local.held)[name] // len(operation.order)
                scratch = max(scratch, min(block, SCRATCH_BYTES))
        staged = list(sent)
        for bucket, elements in local.receive_buffers.items():
            staged[bucket] += elements
        return reshard_memory(
            [[(name, self._itemsize * size) for name, size in storage] for storage in storages],
            own,
            released=released,
            staged=[self._itemsize * elements for elements in staged],
            scratch=scratch,
        )


def _elements(parcel: Parcel) -> int:
    return sum(piece.num_elements for _, piece in parcel)


def _cut(
    held: tuple[tuple[str, int], ...], bucket_elements: int, *, alone: Collection[str]
) -> list[list[tuple[str, int]]]:
    """The training storages: as megatron fills buckets, from the last weight to the first. alone: in no bucket."""
    storages: list[list[tuple[str, int]]] = [[each] for each in held if each[0] in alone]
    filled = bucket_elements
    for name, size in (each for each in held if each[0] not in alone):
        if filled >= bucket_elements:
            storages.append([])
            filled = 0
        storages[-1].append((name, size))
        filled += size
    return storages


def _is_released(storage: list[tuple[str, int]], operations: Mapping[str, Operation] | Mapping[str, Outline]) -> bool:
    """As `reshard.memory.releasable_storages`."""
    found = [operations[name] for name, _ in storage if name in operations]
    contained = len(found) == len(storage) and all(o.contains_training_shard for o in found)
    return contained and any(o.way is Way.GATHER for o in found)


class EngineHoldings:
    """Of `ReshardMemory` what stays while the engine generates, and not what travels: for a search of many layouts."""

    def __init__(self, plan: ReshardPlan, spec: ModelSpec, *, itemsize: int, bucket_elements: int) -> None:
        self._plan, self._spec, self._itemsize, self._bucket_elements = plan, spec, itemsize, bucket_elements
        self._frozen = frozen_weights(spec, "lm")
        self._storages_of: dict[int, list[list[tuple[str, int]]]] = {}  # by pipeline stage of training
        self._known: dict[_Kind, tuple[int, int]] = {}

    def own_and_released(self, rank: int) -> tuple[int, int]:
        """(own, released) bytes of a rank that generates."""
        key = self.standing(rank)
        if key not in self._known:
            self._known[key] = self._count(rank)
        return self._known[key]

    def standing(self, rank: int) -> _Kind:
        """All that `own_and_released` depends on."""
        origin, engine = self._plan.origin(rank), self._plan.rollout.coordinates(rank)
        return rank in self._plan.train, self._plan.train.in_expert_copy(0, origin), engine[1:]

    def _count(self, rank: int) -> tuple[int, int]:
        outlines = self._plan.outlines(rank)
        if all(outline.way is not Way.GATHER for outline in outlines.values()):
            return 0, 0  # nothing is the engine's own, and nothing released
        released = [storage for storage in self._storages(rank) if _is_released(storage, outlines)]
        moved = {name for storage in released for name, _ in storage}
        own = sum(
            -(-outline.num_elements // ALIGNMENT) * ALIGNMENT
            for name, outline in outlines.items()
            if outline.way is Way.GATHER or name in moved
        )
        return self._itemsize * own, self._itemsize * sum(size for storage in released for _, size in storage)

    def _storages(self, rank: int) -> list[list[tuple[str, int]]]:
        if rank not in self._plan.train:
            return []
        stage = self._plan.train.coordinates(rank).pp
        if stage not in self._storages_of:
            weights, cut = reversed(self._plan.trained_weights(rank)), self._plan.train.cut
            held = tuple((weight.megatron, prod(shard_shape(weight, self._spec, cut))) for weight in weights)
            self._storages_of[stage] = _cut(held, self._bucket_elements, alone=self._frozen)
        return self._storages_of[stage]


def formulas(model_bytes: int, train: Layout, rollout: RolloutLayout) -> dict[str, int | None]:
    """Bytes a rank receives by the papers' formulas, None where their premise does not hold.

    HybridFlow (arXiv 2409.19256, table 2): (tp pp - t_g p_g) / (t_g p_g tp pp) M, where generation groups are within
    the training groups: t_g divides tp, p_g divides pp, on the same ranks, of which tp pp have a whole model: experts
    do not lie over several replicas. DeepSpeed-Chat (the same table):
    (n - 1) / n M of n ranks, where training and generation share ranks. Both count a model whose every weight is
    split evenly over all ranks of a group; norms, which are not, and stages of unequal size make a rank differ.
    """
    shards, groups, ranks = train.tp * train.pp, rollout.tp * rollout.pp, len(train.ranks)
    same = train.ranks == rollout.ranks
    within = same and train.tp % rollout.tp == 0 and train.pp % rollout.pp == 0
    within = within and train.dense_per_expert_copy == 1
    return {
        "hybridflow_bytes": (shards - groups) * model_bytes // (groups * shards) if within else None,
        "deepspeed_chat_bytes": (ranks - 1) * model_bytes // ranks if same else None,
    }


# ------------------------------------------------------------------------------------------------ replay


def reshard_memory(
    storages: Sequence[Sequence[tuple[str, int]]],
    own: Sequence[tuple[Sequence[str], int]],
    *,
    released: Sequence[int],
    staged: Sequence[int],
    scratch: int,
) -> ReshardMemory:
    """Replay `reshard.execute` on sizes.

    storages: the (weight, bytes) of each training storage. own: of each bucket the weights in the engine's own memory
    and bytes. released: which storages. staged: bytes of send and receive buffers of each bucket.
    scratch: of a permutation in place.
    """
    sizes = {i: sum(size for _, size in storages[i]) for i in released}
    names = {i: {name for name, _ in storages[i]} for i in released}
    before = live = sum(size for storage in storages for _, size in storage)
    peak, pending = before + scratch, {i: set(names[i]) for i in released}
    for (mine, size), buffers in zip(own, staged, strict=True):
        live += size
        peak = max(peak, live + buffers)
        for i in [i for i in pending if pending[i] & set(mine)]:
            pending[i] -= set(mine)
            if not pending[i]:
                live -= sizes[i]
                del pending[i]
    there = peak - max(before, live)
    return ReshardMemory(
        own=sum(size for _, size in own),
        released=sum(sizes.values()),
        peak_extra=max(there, _restore_peak(live, own, names, sizes) - max(before, live), scratch),
    )


def _restore_peak(
    live: int, own: Sequence[tuple[Sequence[str], int]], names: dict[int, set[str]], sizes: dict[int, int]
) -> int:
    """On the way back storages are filled last to first; a bucket goes when no weight in it is needed any more."""
    needed = Counter(name for group in names.values() for name in group)
    waiting = [(set(mine), size) for mine, size in own]
    peak = live
    for i in [None, *reversed(names)]:
        if i is not None:
            live += sizes[i]
            needed -= Counter(names[i])
        peak = max(peak, live)
        live -= sum(size for mine, size in waiting if not mine & needed.keys())
        waiting = [(mine, size) for mine, size in waiting if mine & needed.keys()]
    return peak
