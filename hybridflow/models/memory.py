"""Give device memory back for a while: what is needed again waits in host memory, what is not is simply released.

Storages are emptied and filled again behind the tensors that use them, so every view of them stays valid. On a CPU the
host is the device and nothing is gained, but the same code runs.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybridflow.parallel.device import uses_cuda


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct, non-empty storages behind `tensors`, in their order."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [storage for pointer, storage in found.items() if pointer]


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(storage.nbytes() for storage in storages(tensors))


class Released:
    """Storages whose content is not needed: emptied, and zeros when they are back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in storages(tensors)]
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
            bytes_of(storage).zero_()


class Offloaded:
    """Storages whose content waits in host memory, page-locked where there is CUDA."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = [(storage, _host_copy(storage)) for storage in storages(tensors)]
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Bit for bit as before."""
        for storage, copy in self._storages:
            storage.resize_(copy.nbytes)
            bytes_of(storage).copy_(copy, non_blocking=True)
        if uses_cuda():
            torch.cuda.synchronize()  # the copies must have arrived before they are freed


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(bytes_of(storage))


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of a storage, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
