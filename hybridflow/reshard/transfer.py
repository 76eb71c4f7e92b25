"""Carry out a reshard plan on the actor's live weights, and undo it: bitwise the same before and after.

There is one copy of the weights. Where the engine's shard is the trainer's memory, as it stands or permuted in place,
nothing else is needed. Where it is more than that, the engine has memory of its own: bucket by bucket it is allocated
and filled, from this rank and from others, and a training storage that is wholly contained in it is released at once.
On the way back training storages are filled from the engine's memory, without communication, and that is released.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models.memory import storages
from hybridflow.models.weights import EMBEDDING, LM_HEAD
from hybridflow.reshard.kernel import Copy, copy_pieces, permute_blocks
from hybridflow.reshard.memory import OwnMemory, moves
from hybridflow.reshard.plan import Message, Operation, ReshardPlan, Way, inverse
from hybridflow.reshard.slices import Piece


@dataclass(frozen=True)
class HandOffCost:
    """What one hand-off took on this rank. Bytes received and sent are those that went between ranks."""

    seconds: float
    bytes_received: int = 0
    bytes_sent: int = 0
    bytes_permuted: int = 0
    peak_extra_bytes: int = 0  # of weights and staging, beyond the larger of what there is before and after


class WeightHandOff:
    """The actor's weights, switched between the trainer's and the engine's layout.

    weights: this rank's training shards by megatron name, none outside the actor's grid. `to_engine` is collective over
    the ranks of both layouts, which `group` knows by their global ranks; `to_trainer` is local. `on_change` is called
    whenever memory was allocated or released.
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
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._weights, self._group, self._on_change = rank, dict(weights), group, on_change
        operations = {operation.weight.megatron: operation for operation in plan.operations(rank)}
        self._moves = moves(self._weights, operations)
        moved = {name for move in self._moves for name in move.names}
        self._steps = [
            _Step(
                names=[weight.megatron for weight in bucket],
                memory=OwnMemory([o for o in mine if o.way is Way.GATHER or o.weight.megatron in moved], dtype, device),
                permuted=[o for o in mine if o.way is Way.PERMUTE and o.weight.megatron not in moved],
                receives=exchange.receives,
                sends=exchange.sends,
            )
            for bucket, exchange in zip(plan.buckets, plan.exchanges(rank), strict=True)
            for mine in [[operations[w.megatron] for w in bucket if w.megatron in operations]]
        ]
        self._own = {name: tensor for step in self._steps for name, tensor in step.memory.tensors.items()}
        self._engine = {o.weight.engine: self._engine_tensor(o) for o in operations.values()}
        self._live = sum(storage.nbytes() for storage in storages(self._weights.values()))
        self._with_engine = False

    @property
    def in_place(self) -> bool:
        """Whether the engine's weights never leave the trainer's memory: their addresses then never change."""
        return not self._own

    def source(self, name: str) -> Tensor:
        """The memory of an engine parameter by the engine's name. A tied head is the embedding."""
        return self._engine[EMBEDDING.engine if name == LM_HEAD.engine and name not in self._engine else name]

    def to_engine(self) -> HandOffCost:
        assert not self._with_engine, "the weights are in the engine's layout already"
        self._with_engine = True
        return self._measured(self._fill_engine)

    def to_trainer(self) -> HandOffCost:
        assert self._with_engine, "the weights are in the trainer's layout already"
        self._with_engine = False
        return self._measured(self._restore_trainer)

    def _engine_tensor(self, operation: Operation) -> Tensor:
        name, view = operation.weight.megatron, operation.view
        if name in self._own:
            return self._own[name]
        rows = self._weights[name][view.row : view.row + view.rows]
        return rows if rows.dim() == 1 else rows[:, view.column : view.column + view.columns]

    # ------------------------------------------------------------------------------------------ there and back

    def _fill_engine(self) -> HandOffCost:
        cost, pending = HandOffCost(0.0), {move: set(move.names) for move in self._moves}
        for step in self._steps:
            self._changed(step.memory.allocate())
            copy_pieces([copy for o in step.memory.operations for copy in self._own_copies(o)])
            received, sent = self._exchange(step)
            scratch = [permute_blocks(self._weights[o.weight.megatron], o.order) for o in step.permuted]
            self._peak = max(self._peak, self._live + max(scratch, default=0))
            for move in [move for move in pending if pending[move] & set(step.names)]:
                pending[move] -= set(step.names)
                if not pending[move]:
                    self._changed(move.release())
            cost = replace(
                cost,
                bytes_received=cost.bytes_received + received,
                bytes_sent=cost.bytes_sent + sent,
                bytes_permuted=cost.bytes_permuted + self._bytes(step.permuted),
            )
        assert not any(pending.values()), f"weights in no bucket: {pending}"
        return cost

    def _restore_trainer(self) -> HandOffCost:
        needed = {name for move in self._moves for name in move.names}
        waiting = [step for step in self._steps if step.memory.operations]
        waiting = self._release_unneeded(waiting, needed)
        for move in reversed(self._moves):
            self._changed(move.allocate())
            copies = [copy for o in move.operations for copy in self._own_copies(o)]
            copy_pieces([(training, engine) for engine, training in copies])
            needed -= set(move.names)
            waiting = self._release_unneeded(waiting, needed)
        assert not waiting, "engine memory that nothing was restored from"
        permuted = [o for step in self._steps for o in step.permuted]
        scratch = [permute_blocks(self._weights[o.weight.megatron], inverse(o.order)) for o in permuted]
        self._peak = max(self._peak, self._live + max(scratch, default=0))
        return HandOffCost(0.0, bytes_permuted=self._bytes(permuted))

    def _release_unneeded(self, steps: list["_Step"], needed: set[str]) -> list["_Step"]:
        """Release the engine's memory of the steps that no training storage is to be restored from; the others."""
        for step in steps:
            if not needed & set(step.memory.tensors):
                self._changed(step.memory.release())
        return [step for step in steps if needed & set(step.memory.tensors)]

    def _own_copies(self, operation: Operation) -> list[Copy]:
        """(engine, training) rectangles of what this rank holds of an engine's shard."""
        name = operation.weight.megatron
        return [
            (_target(self._own[name], piece), _source(self._weights[name], piece))
            for source, piece in operation.pieces
            if source == self._rank
        ]

    # ------------------------------------------------------------------------------------------ between ranks

    def _exchange(self, step: "_Step") -> tuple[int, int]:
        """Send and receive the messages of a bucket; bytes received, bytes sent."""
        if not step.receives and not step.sends:
            return 0, 0
        like = next(iter((self._own or self._weights).values()))
        incoming = [like.new_empty(message.num_elements) for message in step.receives]
        outgoing = [like.new_empty(message.num_elements) for message in step.sends]
        staged = sum(buffer.nbytes for buffer in incoming + outgoing)
        self._changed(staged)
        for message, buffer in zip(step.sends, outgoing, strict=True):
            parts = [_source(self._weights[weight.megatron], piece) for weight, piece in message.parts]
            copy_pieces(list(zip(_packed(buffer, parts), parts, strict=True)))
        peers = [message.peer for message in step.sends + step.receives]
        ways = [dist.isend] * len(outgoing) + [dist.irecv] * len(incoming)
        operations = [
            dist.P2POp(way, buffer, peer, self._group)
            for way, buffer, peer in zip(ways, outgoing + incoming, peers, strict=True)
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        for message, buffer in zip(step.receives, incoming, strict=True):
            parts = [_target(self._own[weight.megatron], piece) for weight, piece in message.parts]
            copy_pieces(list(zip(parts, _packed(buffer, parts), strict=True)))
        self._changed(-staged)
        return sum(buffer.nbytes for buffer in incoming), sum(buffer.nbytes for buffer in outgoing)

    # ------------------------------------------------------------------------------------------ accounting

    def _measured(self, work: Callable[[], HandOffCost]) -> HandOffCost:
        before, started = self._live, time.perf_counter()
        self._peak = before
        cost = work()
        if any(x.is_cuda for x in self._weights.values()):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return replace(cost, seconds=seconds, peak_extra_bytes=self._peak - max(before, self._live))

    def _changed(self, num_bytes: int) -> None:
        if num_bytes:
            self._live += num_bytes
            self._peak = max(self._peak, self._live)
            self._on_change()

    def _bytes(self, operations: Iterable[Operation]) -> int:
        return sum(self._weights[operation.weight.megatron].nbytes for operation in operations)


@dataclass(frozen=True)
class _Step:
    """What happens on this rank with one bucket of weights."""

    names: list[str]
    memory: OwnMemory
    permuted: list[Operation]  # in place
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


def _target(x: Tensor, piece: Piece) -> Tensor:
    """The piece of the engine's shard."""
    rows = x[piece.row : piece.row + piece.rows]
    return rows if x.dim() == 1 else rows[:, piece.column : piece.column + piece.columns]


def _source(x: Tensor, piece: Piece) -> Tensor:
    """The piece of a training shard."""
    rows = x[piece.source_row : piece.source_row + piece.rows]
    return rows if x.dim() == 1 else rows[:, piece.source_column : piece.source_column + piece.columns]


def _packed(buffer: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """The parts of a message in its buffer, each in its shape."""
    return [flat.view(part.shape) for flat, part in zip(buffer.split([x.numel() for x in parts]), parts, strict=True)]
