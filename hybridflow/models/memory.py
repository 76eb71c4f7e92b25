"""Give device memory back for a while: what is needed again waits in host memory, what is not is simply released.

Storages are emptied and filled again behind the tensors that use them, so every view of them stays valid. On a CPU the
host is the device and nothing is gained, but the same code runs.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybridflow.parallel.device import uses_cuda

MADV_DONTNEED = 4  # linux/mman.h; Python's mmap names it for its own mappings alone


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct, non-empty storages behind `tensors`, in their order."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [storage for pointer, storage in found.items() if pointer]


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(storage.nbytes() for storage in storages(tensors))


def refill_with_zeros(storage: torch.UntypedStorage, size: int) -> None:
    """Give an empty storage `size` bytes of zeros.

    On a CPU whole pages are exchanged for fresh ones, which the kernel hands out as zeros when they are first touched:
    what is never touched costs neither time nor memory.
    """
    storage.resize_(size)
    memory = bytes_of(storage)
    head = -storage.data_ptr() % mmap.PAGESIZE
    tail = max(size - head, 0) % mmap.PAGESIZE
    if storage.device.type != "cpu" or not _fresh_pages(storage.data_ptr() + head, size - head - tail):
        memory.zero_()
        return
    memory[:head].zero_()
    memory[size - tail :].zero_()


def _fresh_pages(start: int, size: int) -> bool:
    """Whether these whole pages could be given back to the kernel. There they stand, as before, but empty.

    Of memory that is private and anonymous, as that of torch's allocator is, the next reading gives zeros: madvise(2).
    """
    if sys.platform != "linux" or size <= 0:
        return False
    advised = ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_DONTNEED)
    return bool(advised == 0)  # not so for locked pages


class Released:
    """Storages whose content is not needed: emptied, and zeros when they are back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in storages(tensors)]
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._storages:
            refill_with_zeros(storage, size)


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
