"""The reshard plan: how each of the actor's parameters becomes the engine's. Pure: no tensors, no torch.distributed.

    alias     the engine's shard is byte for byte the training shard: the engine's parameter is the trainer's memory
    permute   the same elements in another row order: one read and one write in place, undone before training goes on

The engine has the training layout (tp alike), so no rank needs what another holds and nothing is received.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

from hybridflow.models.spec import ModelSpec
from hybridflow.models.weights import Split, Weight, model_weights, shard_shape


class Way(Enum):
    ALIAS = "alias"
    PERMUTE = "permute"


@dataclass(frozen=True)
class Operation:
    """What happens to one parameter on its way to the engine."""

    weight: Weight
    way: Way
    order: tuple[
        int, ...
    ]  # permute: block i of the engine's rows is block order[i] of the trainer's; a block is a head
    num_elements: int  # of the shard


@dataclass(frozen=True)
class ReshardPlan:
    operations: tuple[Operation, ...]

    def permuted(self) -> Iterator[Operation]:
        return (operation for operation in self.operations if operation.way is Way.PERMUTE)

    @property
    def permuted_elements(self) -> int:
        return sum(operation.num_elements for operation in self.permuted())

    @property
    def received_elements(self) -> int:
        """What this rank must receive: engine shard - what it holds = 0 where the layouts match."""
        return 0


def plan_reshard(spec: ModelSpec, tp: int) -> ReshardPlan:
    """The plan for an actor and an engine that are both cut over `tp` ranks. The same for every rank."""
    order = head_order(spec.num_heads // tp, spec.num_kv_heads // tp)
    identity = tuple(range(len(order)))
    operations = []
    for weight in model_weights(spec, "lm"):
        moves = weight.split is Split.QKV and order != identity
        size = prod(shard_shape(weight, spec, tp))
        operations.append(Operation(weight, Way.PERMUTE if moves else Way.ALIAS, order if moves else (), size))
    return ReshardPlan(tuple(operations))


def head_order(num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Where each head of the engine's [all q; all k; all v] stands in megatron's [q.., k, v] per key/value group."""
    queries = num_heads // num_kv_heads
    group = queries + 2
    q = [g * group + i for g in range(num_kv_heads) for i in range(queries)]
    k = [g * group + queries for g in range(num_kv_heads)]
    return (*q, *k, *(block + 1 for block in k))


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order that undoes `order`."""
    return tuple(order.index(i) for i in range(len(order)))
