"""Carry out a reshard plan on the actor's live weights, and undo it: bitwise the same before and after.

There is one copy of the weights. Where the engine's shard is the trainer's memory, as it stands or permuted in place,
nothing else is needed. Where the engine's shard is more, the engine has own memory: bucket by bucket it is allocated
and filled, from this rank and from others, and a training storage that is wholly contained in it is released at once.
On the way back training storages are filled from the engine's memory, without communication, and that is released.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.tables import LM_HEAD
from hybridflow.architecture.tied_head import EMBEDDING
from hybridflow.architecture.weight import Weight
from hybridflow.cpu import mover as cpu_mover
from hybridflow.cpu.kernels.library import library
from hybridflow.cpu.transport import Reads, Traffic
from hybridflow.models.memory import storages
from hybridflow.reshard.kernel import (
    BY_TRITON,
    Copy,
    Mover,
    Stacks,
    as_matrix,
    prepared_copies,
    prepared_permutation,
)
from hybridflow.reshard.memory import OwnMemory, Resized, releasable_storages
from hybridflow.reshard.plan import BucketTraffic, Message, Operation, ReshardPlan, Way, inverse
from hybridflow.reshard.reserved import AddressSpace
from hybridflow.reshard.slices import Content, Piece, content, parcels_of


def select_mover(device: torch.device) -> Mover:
    """By the device, and on a CPU by whether there are kernels in C."""
    if device.type == "cuda":
        return BY_TRITON
    permute = cpu_mover.permute_by_torch if library() is None else cpu_mover.permute_in_c

    def permutation(groups: Sequence[Stacks]) -> Callable[[], int]:
        return lambda: max((permute(stacks, order) for stacks, order in groups), default=0)

    return Mover(permutation, lambda copies: partial(cpu_mover.copy_each, copies))


@dataclass(frozen=True)
class ReshardCost:
    """What one reshard took on this rank. Bytes received and sent are those that went between ranks."""

    seconds: float
    bytes_received: int = 0
    bytes_sent: int = 0
    bytes_permuted: int = 0
    peak_extra_bytes: int = 0  # of weights and staging, beyond the larger of what there is before and after


class WeightReshard:
    """The actor's weights, switched between the trainer's and the engine's layout.

    weights: this rank's training shards by megatron name, none outside the actor's grid. `to_engine` is collective over
    the ranks of both layouts, which `group` knows by their global ranks; `to_trainer` is local.
    space: where the engine's own memory is reserved, so that no tensor of the engine ever lies elsewhere; None: with
    torch, which gives it other addresses each time.
    reads: on CPUs, whether ranks read in each other's memory where they can; all ranks say the same.
    frozen: names of weights that never change, which whole buckets are of: once the engine has memory of its own for
    such a weight the memory stays, and nothing travels again. All ranks say the same.
    with_engine: whether they are in the engine's layout.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        weights: Mapping[str, Tensor],
        *,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        space: AddressSpace | None = None,
        reads: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        self._rank, self._group, self._space = rank, group, space
        # the experts of a layer stand one below the other
        self._weights = {name: x.flatten(0, 1) if x.dim() == 3 else x for name, x in weights.items()}
        self._dtype, self._device, self._mover = dtype, device, select_mover(device)
        operations = {operation.weight.megatron: operation for operation in plan.operations(rank)}
        self._stagings: dict[tuple[int, ...], _Staging] = {}
        changing = {name: x for name, x in self._weights.items() if name not in frozen}
        self._moves = releasable_storages(changing, operations)
        moved = {name for move in self._moves for name in move.names}
        steps = (
            self._step([operations[w.megatron] for w in bucket if w.megatron in operations], bucket, traffic, moved)
            for bucket, traffic in zip(plan.buckets, plan.traffic(rank), strict=True)
        )
        self._steps = [step for step in steps if step.memory.operations or step.traffic.receives or step.traffic.sends]
        self._later = [step for step in self._steps if not step.is_of(frozen)]  # what the first time leaves to do
        self._has_frozen = False
        self._reads = self._later_reads = None
        if reads and device.type == "cpu":
            all_reads, later = (Reads([step.traffic for step in x], group) for x in (self._steps, self._later))
            self._reads, self._later_reads = all_reads, later if frozen else all_reads
        self._permuted = [o for o in operations.values() if o.way is Way.PERMUTE and o.weight.megatron not in moved]
        weights_and_orders = [(self._weights[o.weight.megatron], o.order) for o in self._permuted]
        self._permute = prepared_permutation(weights_and_orders, self._mover)
        self._permute_back = prepared_permutation([(x, inverse(order)) for x, order in weights_and_orders], self._mover)
        self._own = {name: tensor for step in self._steps for name, tensor in step.memory.tensors.items()}
        copies = {name: pairs for step in self._steps for name, pairs in step.copies.items()}
        self._restores = [
            prepared_copies(
                [(training, engine) for name in move.names for engine, training in copies[name]], self._mover
            )
            for move in self._moves
        ]
        assert moved <= self._own.keys(), "the engine has a view of a training storage that is released meanwhile"
        self._engine = {o.weight.engine: self._engine_tensor(o) for o in operations.values()}
        self._elsewhere = {w.engine: self._dtype_of(w) for bucket in plan.buckets for w in bucket}
        if EMBEDDING in operations:  # a tied head is the embedding
            self._engine.setdefault(LM_HEAD.engine, self._engine[operations[EMBEDDING].weight.engine])
        self._live = self._peak = sum(storage.nbytes() for storage in storages(self._weights.values()))
        self.with_engine = False

    def engine_tensor(self, name: str) -> Tensor:
        """The memory of an engine parameter by the engine's name; experts one below the other.

        Empty where another pipeline stage of the engine holds it: some models make all their parameters on every stage.
        """
        if name not in self._engine and name in self._elsewhere:
            return torch.empty(0, dtype=self._elsewhere[name], device=self._device)
        return self._engine[name]

    def to_engine(self) -> ReshardCost:
        assert not self.with_engine, "the weights are in the engine's layout already"
        self.with_engine = True
        return self._measured(self._fill_engine)

    def to_trainer(self) -> ReshardCost:
        assert self.with_engine, "the weights are in the trainer's layout already"
        self.with_engine = False
        return self._measured(self._restore_trainer)

    def _step(
        self, operations: list[Operation], bucket: Sequence[Weight], traffic: BucketTraffic, moved: set[str]
    ) -> "_Step":
        """operations: of the bucket's weights that the engine has here."""
        own = [o for o in operations if o.way is Way.GATHER or o.weight.megatron in moved]
        memory = OwnMemory(own, self._dtype_of(bucket[0]), self._device, self._space)
        contents, sends = self._sends(traffic.sends)
        receives = [
            (message.peer, [_target(memory.tensors[weight.megatron], piece) for weight, piece in parcel])
            for message in traffic.receives
            for parcel in parcels_of(message.pieces)
        ]
        copies = {o.weight.megatron: self._own_copies(o, memory.tensors[o.weight.megatron]) for o in own}
        fill = prepared_copies([copy for pairs in copies.values() for copy in pairs], self._mover)
        memory.release()
        names = [weight.megatron for weight in bucket]
        return _Step(names, memory, copies=copies, fill=fill, traffic=Traffic(receives, contents, sends))

    def _dtype_of(self, weight: Weight) -> torch.dtype:
        """Alike in a bucket."""
        return torch.float32 if weight.float32 else self._dtype

    def _engine_tensor(self, operation: Operation) -> Tensor:
        name, view = operation.weight.megatron, operation.view
        if name in self._own:
            return self._own[name]
        assert view is not None, f"{name} is gathered and has no memory of its own"
        rows = self._weights[name][view.row : view.row + view.rows]
        return rows if rows.dim() == 1 else rows[:, view.column : view.column + view.columns]

    # ------------------------------------------------------------------------------------------ there and back

    def _fill_engine(self) -> ReshardCost:
        cost, pending = ReshardCost(0.0), {move: set(move.names) for move in self._moves}
        steps, reads = (self._later, self._later_reads) if self._has_frozen else (self._steps, self._reads)
        exchange = self._exchange if reads is None else reads.begin(self._exchange)
        self._has_frozen = True
        for step in steps:
            self._changed(step.memory.allocate())
            step.fill()
            received, sent = exchange(step.traffic)
            for move in [move for move in pending if pending[move] & set(step.names)]:
                pending[move] -= set(step.names)
                if not pending[move]:
                    self._changed(move.release())
            cost = replace(
                cost,
                bytes_received=cost.bytes_received + received,
                bytes_sent=cost.bytes_sent + sent,
            )
        assert not any(pending.values()), f"weights in no bucket: {pending}"
        self._permuted_by(self._permute)  # last: other ranks get rows in the trainer's order
        return replace(cost, bytes_permuted=self._bytes(self._permuted))

    def _restore_trainer(self) -> ReshardCost:
        needed = {name for move in self._moves for name in move.names}
        waiting = [step for step in self._later if step.memory.operations]
        waiting = self._release_unneeded(waiting, needed)
        for move, restore in zip(reversed(self._moves), reversed(self._restores), strict=True):
            self._changed(move.allocate())
            restore()
            needed -= set(move.names)
            waiting = self._release_unneeded(waiting, needed)
        assert not waiting, "engine memory that nothing was restored from"
        self._permuted_by(self._permute_back)
        return ReshardCost(0.0, bytes_permuted=self._bytes(self._permuted))

    def _permuted_by(self, permutation: Callable[[], int]) -> None:
        """Those that are permuted in place."""
        self._peak = max(self._peak, self._live + permutation())

    def _release_unneeded(self, steps: list["_Step"], needed: set[str]) -> list["_Step"]:
        """Release the engine's memory of the steps that no training storage is to be restored from; the others."""
        for step in steps:
            if not needed & set(step.memory.tensors):
                self._changed(step.memory.release())
        return [step for step in steps if needed & set(step.memory.tensors)]

    def _own_copies(self, operation: Operation, own: Tensor) -> list[Copy]:
        """(engine, training) rectangles of what this rank holds of an engine's shard.

        own: memory of the engine, which is there: of released memory no views can be made.
        """
        name = operation.weight.megatron
        return [
            (as_matrix(_target(own, piece)), as_matrix(_source(self._weights[name], piece)))
            for source, piece in operation.pieces
            if source == self._rank
        ]

    # ------------------------------------------------------------------------------------------ between ranks

    def _exchange(self, traffic: Traffic) -> tuple[int, int]:
        """Send and receive what is due in a bucket; bytes received, bytes sent."""
        receives, contents, sends = traffic
        if not receives and not sends:
            return 0, 0
        sent = list(dict.fromkeys(i for _, i in sends))
        outgoing = self._staging([contents[i] for i in sent], out=True)
        incoming = self._staging([parts for _, parts in receives], out=False)
        self._changed(outgoing.allocate() + incoming.allocate())
        outgoing.copy()
        content_of = dict(zip(sent, outgoing.tensors, strict=True))
        operations = [dist.P2POp(dist.isend, content_of[i], peer, self._group) for peer, i in sends]
        operations += [
            dist.P2POp(dist.irecv, x, peer, self._group)
            for x, (peer, _) in zip(incoming.tensors, receives, strict=True)
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        incoming.copy()
        self._changed(outgoing.release() + incoming.release())
        return sum(x.nbytes for x in incoming.tensors), sum(content_of[i].nbytes for _, i in sends)

    def _staging(self, contents: list[list[Tensor]], *, out: bool) -> "_Staging":
        """Made once for the same contents, which the steps keep. out: they are sent."""
        key = tuple(map(id, contents))
        if key not in self._stagings:
            self._stagings[key] = _Staging(contents, self._mover, out=out)
        return self._stagings[key]

    def _sends(self, messages: Sequence[Message]) -> tuple[list[list[Tensor]], list[tuple[int, int]]]:
        """(contents, (peer, index of the peer's content)): a content for several peers is held once."""
        known: dict[Content, int] = {}
        contents: list[list[Tensor]] = []
        sends = []
        for message in messages:
            for parcel in parcels_of(message.pieces):
                if content(parcel) not in known:
                    known[content(parcel)] = len(contents)
                    contents.append([_source(self._weights[weight.megatron], piece) for weight, piece in parcel])
                sends.append((message.peer, known[content(parcel)]))
        return contents, sends

    # ------------------------------------------------------------------------------------------ accounting

    def _measured(self, work: Callable[[], ReshardCost]) -> ReshardCost:
        before, started = self._live, time.perf_counter()
        self._peak = before
        cost = work()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        return replace(cost, seconds=seconds, peak_extra_bytes=self._peak - max(before, self._live))

    def _changed(self, num_bytes: int) -> None:
        self._live += num_bytes
        self._peak = max(self._peak, self._live)

    def _bytes(self, operations: Iterable[Operation]) -> int:
        return sum(self._weights[operation.weight.megatron].nbytes for operation in operations)


@dataclass(frozen=True)
class _Step:
    """What happens on this rank with one bucket of weights."""

    names: list[str]
    memory: OwnMemory
    copies: dict[str, list[Copy]]  # of this rank, by weight: (engine, training)
    fill: Callable[[], object]  # makes them
    traffic: Traffic

    def is_of(self, frozen: Collection[str]) -> bool:
        """Whether the bucket's weights are among these: all are, or none."""
        return self.names[0] in frozen


def _target(x: Tensor, piece: Piece) -> Tensor:
    """The piece of the engine's shard."""
    rows = x[piece.row : piece.row + piece.rows]
    return rows if x.dim() == 1 else rows[:, piece.column : piece.column + piece.columns]


def _source(x: Tensor, piece: Piece) -> Tensor:
    """The piece of a training shard."""
    rows = x[piece.source_row : piece.source_row + piece.rows]
    return rows if x.dim() == 1 else rows[:, piece.source_column : piece.source_column + piece.columns]


class _Staging:
    """Contents that travel, each as one tensor: a single part of neighbouring elements as it lies, others as a buffer.

    Buffers are there between `allocate` and `release`. copy: fills them from the parts or, incoming, the other way.
    """

    def __init__(self, contents: list[list[Tensor]], mover: Mover, *, out: bool) -> None:
        self.tensors: list[Tensor] = []
        self._memories: list[Resized] = []
        copies: list[Copy] = []
        for parts in contents:
            tensor = parts[0]
            if len(parts) > 1 or not tensor.is_contiguous():
                self._memories.append(Resized(sum(part.nbytes for part in parts), tensor.device))
                tensor = self._memories[-1].tensor().view(tensor.dtype)
                pairs = zip(tensor.split([part.numel() for part in parts]), parts, strict=True)
                copies += [(flat.view(part.shape), part) for flat, part in pairs]
            self.tensors.append(tensor)
        self.copy = prepared_copies(copies if out else [(part, flat) for flat, part in copies], mover)
        self.release()

    def allocate(self) -> int:
        """The bytes by which the rank's memory grows."""
        for memory in self._memories:
            memory.map()
        return sum(memory.size for memory in self._memories)

    def release(self) -> int:
        """The bytes by which the rank's memory grows: a negative number."""
        for memory in self._memories:
            memory.unmap()
        return -sum(memory.size for memory in self._memories)
