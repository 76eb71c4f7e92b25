"""An optimizer whose state lies in host memory: a step brings the state to the device in parts.

Adam and SGD step each element by itself. So a part is a run of elements of any parameters, with all that belongs to
each: the float32 main weight of a bfloat16 model and the moments. A part fills a block of host memory, and a step has
two parts on the device (`in_two_slots`). The bits are those of a whole step.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from hybridflow.models.memory import host_block, storages
from hybridflow.models.optimizer_state import MAIN, OwnedState, Stepped, count_device, counts_in_groups, stepped
from hybridflow.parallel.device import current_device, wait_for
from hybridflow.parallel.host_memory import ALIGNMENT, GIB, SLOTS, part_blocks
from hybridflow.parallel.lanes import in_two_slots
from hybridflow.parallel.platform import new_lanes
from hybridflow.parallel.torchrun import torchrun_rank

LOG = logging.getLogger(__name__)
ITEM = torch.float32.itemsize
STRIDE = ALIGNMENT // ITEM  # elements: cuts lie at multiples, so that a kernel's vectors hold what they did
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class StagedPiece:
    """Elements start .. stop of a share that the optimizer of number `optimizer` steps."""

    optimizer: int
    share: Stepped
    start: int
    stop: int
    places: dict[str, int]  # by name of the tensor: where the tensor begins in the part, in bytes

    def tensors(self, part: Tensor) -> dict[str, Tensor]:
        """(stop - start,) float32 each, in the memory of the part."""
        size = ITEM * (self.stop - self.start)
        return {name: part[place : place + size].view(torch.float32) for name, place in self.places.items()}

    @property
    def main(self) -> Tensor:
        """(stop - start,) of what megatron has the optimizer step."""
        return self.share.main.data.view(-1)[self.start : self.stop]

    @property
    def gradient(self) -> Tensor | None:
        """(stop - start,) float32."""
        whole = self.share.main.grad
        return None if whole is None else whole.view(-1)[self.start : self.stop]

    @property
    def weight(self) -> Tensor:
        """(stop - start,) of the model's weight."""
        first = self.share.start
        return self.share.parameter.data.view(-1)[first + self.start : first + self.stop]


class StagedStep:
    """Takes the state of megatron's optimizers, before their first step, to host memory, and steps them from there.

    moments: what an optimizer keeps of each element.
    """

    def __init__(self, optimizers: Sequence[MegatronOptimizer], moments: Sequence[str]) -> None:
        self._optimizers, self._steps, self._lanes = optimizers, 0, new_lanes()
        shares = [(number, share) for number, each in enumerate(optimizers) for share in stepped(each)]
        named = [(number, share, (*[MAIN] * share.has_copy, *moments)) for number, share in shares]
        total = sum(len(names) * _aligned(share.stop - share.start) for _, share, names in named)
        _, self._size = part_blocks(total)
        self._parts = list(self._cut(named))
        self.blocks = list(_taken(len(self._parts), self._size))
        with torch.no_grad():
            for piece, block in self._places():
                for name, tensor in piece.tensors(block).items():
                    tensor.copy_(piece.main.data) if name == MAIN else tensor.zero_()
        for storage in storages(share.main.data for _, share, names in named if MAIN in names):
            storage.resize_(0)

    @torch.no_grad()
    def step(self) -> None:
        """One step with the gradients that megatron has prepared, from main weights to the model's."""
        device = current_device()
        slots = [torch.empty(self._size, dtype=torch.uint8, device=device) for _ in self._parts[:SLOTS]]
        in_two_slots(
            self._lanes,
            len(self._parts),
            fetch=lambda number: slots[number % SLOTS].copy_(self.blocks[number], non_blocking=True),
            step=lambda number: self._step(self._parts[number], slots[number % SLOTS]),
            put_away=lambda number: self.blocks[number].copy_(slots[number % SLOTS], non_blocking=True),
        )
        self._steps += 1

    def owned_states(self) -> Iterator[OwnedState]:
        """As of `optimizer_state`: in host memory, and of a parameter several that follow each other."""
        wait_for(current_device())  # what the last step has put away is on the way
        for piece, block in self._places():
            first = piece.share.start
            yield OwnedState(piece.share.parameter, first + piece.start, first + piece.stop, piece.tensors(block))

    def num_steps(self) -> int:
        """See `optimizer_state`."""
        return self._steps if self._parts and self._optimizers[0].config.optimizer == "adam" else 0

    def set_num_steps(self, steps: int) -> None:
        """See `optimizer_state`."""
        self._steps = steps

    def _places(self) -> Iterator[tuple[StagedPiece, Tensor]]:
        for pieces, block in zip(self._parts, self.blocks, strict=True):
            yield from ((piece, block) for piece in pieces)

    def _cut(self, named: Sequence[tuple[int, Stepped, tuple[str, ...]]]) -> Iterator[list[StagedPiece]]:
        """Parts that are full but for the last one; a share may lie in several."""
        part, place = list[StagedPiece](), 0
        for number, share, names in named:
            start, count = 0, share.stop - share.start
            while start < count:
                room = (self._size - place) // (ALIGNMENT * len(names)) * STRIDE if names else count
                if room == 0:
                    yield part
                    part, place = [], 0
                    continue
                stop = min(start + room, count)
                size = _aligned(stop - start)
                places = {name: place + i * size for i, name in enumerate(names)}
                part.append(StagedPiece(number, share, start, stop, places))
                start, place = stop, place + len(names) * size
        if part:
            yield part

    def _step(self, pieces: Sequence[StagedPiece], slot: Tensor) -> None:
        for number, of_one in groupby(pieces, key=lambda piece: piece.optimizer):
            self._step_some(self._optimizers[number], list(of_one), slot)

    def _step_some(self, part: MegatronOptimizer, pieces: Sequence[StagedPiece], slot: Tensor) -> None:
        """With groups and states of the pieces in place of the optimizer's own."""
        inner = part.optimizer
        groups, state = inner.param_groups, inner.state
        places = {id(main): place for place, group in enumerate(groups) for main in group["params"]}
        own: dict[int, list[Tensor]] = {}
        counts = _counts(inner, pieces, self._steps)
        inner.state = defaultdict(dict)
        for number, piece in enumerate(pieces):
            tensors = piece.tensors(slot)
            main = tensors.pop(MAIN) if MAIN in tensors else piece.main
            main.grad = piece.gradient
            inner.state[main] = tensors | ({} if counts is None else {"step": counts[number]})
            own.setdefault(places[id(piece.share.main)], []).append(main)
        more = {"step": self._steps} if counts_in_groups(part) else {}
        inner.param_groups = [{**groups[place], "params": mains, **more} for place, mains in own.items()]
        try:
            inner.step()
        finally:
            inner.param_groups, inner.state = groups, state
        for piece in pieces:
            if MAIN in piece.places:
                piece.weight.copy_(piece.tensors(slot)[MAIN])


def _counts(optimizer: torch.optim.Optimizer, pieces: Sequence[StagedPiece], steps: int) -> Sequence[Tensor] | None:
    """torch's Adam has a count of steps for each tensor; others None."""
    if not isinstance(optimizer, torch.optim.Adam):
        return None
    device = count_device(optimizer, pieces[0].share.main)
    return torch.full((len(pieces),), float(steps), dtype=torch.float32, device=device).unbind()


def _aligned(count: int) -> int:
    """Bytes of so many float32 elements, so that the next ones begin where a kernel's vectors may."""
    return -(-ITEM * count // ALIGNMENT) * ALIGNMENT


def _taken(count: int, size: int) -> Iterator[Tensor]:
    """Blocks of host memory, with a line every few seconds: page-locking takes a minute for some tens of GiB."""
    told = perf_counter()
    for number in range(count):
        if perf_counter() > told + SECONDS_BETWEEN_LINES:
            told = perf_counter()
            taken, whole = number * size / GIB, count * size / GIB
            LOG.info("optimizer states: %.1f of %.1f GiB of host memory are taken", taken, whole)
            if torchrun_rank()[0] == 0:
                print(f"optimizer states: {taken:.1f} of {whole:.1f} GiB of host memory are taken", flush=True)
        yield host_block(size)
