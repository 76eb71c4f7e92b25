"""Carry out a reshard plan on the actor's live weights, and undo it: bitwise the same before and after."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridflow.reshard.kernel import permute_heads
from hybridflow.reshard.plan import ReshardPlan, inverse


@dataclass(frozen=True)
class HandOffCost:
    """What one hand-off took on this rank."""

    seconds: float
    bytes_received: int
    bytes_permuted: int
    peak_extra_bytes: int


class WeightHandOff:
    """The actor's parameters by megatron name, switched between the trainer's and the engine's layout in place."""

    def __init__(self, plan: ReshardPlan, parameters: Mapping[str, Tensor]) -> None:
        self._moves = [(parameters[op.weight.megatron], op.order) for op in plan.permuted()]
        self._with_engine = False

    def to_engine(self) -> HandOffCost:
        assert not self._with_engine, "the weights are in the engine's layout already"
        self._with_engine = True
        return self._permute([(x, order) for x, order in self._moves])

    def to_trainer(self) -> HandOffCost:
        assert self._with_engine, "the weights are in the trainer's layout already"
        self._with_engine = False
        return self._permute([(x, inverse(order)) for x, order in self._moves])

    def _permute(self, moves: list[tuple[Tensor, tuple[int, ...]]]) -> HandOffCost:
        started = time.perf_counter()
        scratch = [permute_heads(x, order) for x, order in moves]
        return HandOffCost(
            seconds=time.perf_counter() - started,
            bytes_received=0,
            bytes_permuted=sum(x.nbytes for x, _ in moves),
            peak_extra_bytes=max(scratch, default=0),
        )
