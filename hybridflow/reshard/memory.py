"""Memory that changes hands: the engine's own, and training storages that are released meanwhile.

Memory goes and comes behind the tensors that view it: the tensors stay the same objects throughout.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from hybridflow.models.memory import bytes_of
from hybridflow.reshard.plan import Operation, Way
from hybridflow.reshard.reserved import AddressSpace, Reserved

ALIGNMENT = 64  # elements: where a weight begins in the engine's own memory


class Resized:
    """A storage of torch's allocator that is freed and allocated again, at any address. Allocated at first."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._storage, self.size = torch.UntypedStorage(num_bytes, device=device), num_bytes

    def map(self) -> None:
        self._storage.resize_(self.size)

    def unmap(self) -> None:
        self._storage.resize_(0)

    def tensor(self) -> Tensor:
        return bytes_of(self._storage)


class OwnMemory:
    """The engine's own memory of one bucket: in one piece, there only while the engine has the weights.

    The memory exists at first, for callers to take views. space: reserves the addresses, so that they stay.
    """

    def __init__(
        self, operations: list[Operation], dtype: torch.dtype, device: torch.device, space: AddressSpace | None
    ) -> None:
        self.operations = operations
        starts, size = [], 0
        for operation in operations:
            starts.append(size)
            size += -(-prod(operation.shape) // ALIGNMENT) * ALIGNMENT
        self._memory = _memory(size * dtype.itemsize, device, space)
        flat = self._memory.tensor().view(dtype)
        self.tensors = {
            o.weight.megatron: flat[start : start + prod(o.shape)].view(o.shape)
            for o, start in zip(operations, starts, strict=True)
        }

    def allocate(self) -> int:
        """Allocate the memory; the bytes by which the rank's memory grows."""
        self._memory.map()
        return self._memory.size

    def release(self) -> int:
        """Free the memory; the bytes by which the rank's memory grows, a negative number."""
        self._memory.unmap()
        return -self._memory.size


def _memory(num_bytes: int, device: torch.device, space: AddressSpace | None) -> Resized | Reserved:
    if space is None or num_bytes == 0:
        return Resized(num_bytes, device)
    reserved = Reserved(num_bytes, space)
    reserved.map()
    return reserved


class ReleasableStorage:
    """A training storage that is released while the engine's own memory holds all of the storage."""

    def __init__(self, weights: list[Tensor], operations: list[Operation]) -> None:
        self.operations = operations
        self.names = [operation.weight.megatron for operation in operations]
        self._storage = weights[0].untyped_storage()
        self._size, self._gaps = self._storage.nbytes(), _gaps(weights)

    def allocate(self) -> int:
        """The bytes by which the rank's memory grows.

        What lies between the weights is zero, as it was; the weights are for others to fill.
        """
        self._storage.resize_(self._size)
        for gap in self._gaps:
            gap.zero_()
        return self._size

    def release(self) -> int:
        self._storage.resize_(0)
        return -self._size


def releasable_storages(weights: Mapping[str, Tensor], operations: Mapping[str, Operation]) -> list[ReleasableStorage]:
    """The storages to release: something in them must be gathered, and the engine has all of what they hold."""
    held: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        held.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    found_moves = []
    for names in held.values():
        found = [operations[name] for name in names if name in operations]
        contained = len(found) == len(names) and all(o.contains_training_shard for o in found)
        if contained and any(o.way is Way.GATHER for o in found):
            found_moves.append(ReleasableStorage([weights[name] for name in names], found))
    return found_moves


def _gaps(weights: list[Tensor]) -> list[Tensor]:
    """The bytes of a storage that belong to none of the weights, each of which is contiguous."""
    storage = weights[0].untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    starts = [x.storage_offset() * x.element_size() for x in weights]
    taken = sorted((start, start + x.nbytes) for start, x in zip(starts, weights, strict=True))
    bounds = [0, *(edge for interval in taken for edge in interval), storage.nbytes()]
    return [flat[start:stop] for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if stop > start]
