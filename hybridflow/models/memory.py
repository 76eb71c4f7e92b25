"""Give device memory back for a while: what is needed again waits in host memory, what is not is simply released.

Storages are emptied and filled again behind the tensors that use them, so every view of them stays valid. On a CPU the
host is the device and nothing is gained, but the same code runs.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.host_memory import ALIGNMENT, PART_BYTES
from hybridflow.parallel.platform import zero_function

BLOCK_BYTES = PART_BYTES  # of host memory


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct, non-empty storages behind `tensors`, in their order."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return [storage for pointer, storage in found.items() if pointer]


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(storage.nbytes() for storage in storages(tensors))


def tensors_of(caches: Iterable[Tensor | Sequence[Tensor]]) -> Iterator[Tensor]:
    """Of the engine's layers: attention has one tensor, a gated delta net has two."""
    for cache in caches:
        yield from (cache,) if isinstance(cache, Tensor) else cache


class Released:
    """Storages whose content is not needed: emptied, and zeros when they are back."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in storages(tensors)]
        self._zero = zero_function()
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
            self._zero(bytes_of(storage))


class HostMemory:
    """Where storages wait: blocks in host memory, page-locked where there is CUDA.

    kept: `done` keeps the blocks; None: where they are page-locked. Page-locked memory is slow to make and never goes
    back to the system. Other memory would be held twice while models train. torch's allocator gives page-locked memory
    in powers of two: a block has such a size, and a storage may lie in several blocks.
    """

    def __init__(self, *, kept: bool | None = None, block_bytes: int = BLOCK_BYTES) -> None:
        self.blocks: list[Tensor] = []
        self._kept, self._block_bytes = uses_cuda() if kept is None else kept, block_bytes

    def reserve(self, size: int) -> None:
        if size > sum(block.nbytes for block in self.blocks):
            self.blocks.clear()  # before others are taken
            starts = range(0, size, self._block_bytes)
            self.blocks += [host_block(min(self._block_bytes, size - start)) for start in starts]

    def pieces(self, start: int, size: int) -> Iterator[Tensor]:
        """The bytes start .. start + size, over all blocks."""
        stop = start + size
        while start < stop:
            number, offset = divmod(start, self._block_bytes)
            piece = self.blocks[number][offset : offset + stop - start]
            yield piece
            start += piece.nbytes

    def done(self) -> None:
        if not self._kept:
            self.blocks.clear()


def host_tensors(wanted: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> Iterator[Tensor]:
    """Empty tensors in host memory, page-locked where there is CUDA: many in a block, for torch's allocator rounds each
    block of such memory up to a power of two.
    """
    places = [(shape, dtype, -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT) for shape, dtype in wanted]
    left, block = sum(size for _, _, size in places), torch.empty(0, dtype=torch.uint8)
    for shape, dtype, size in places:
        if size > block.nbytes:
            block = host_block(max(size, min(left, BLOCK_BYTES)))
        yield block[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        block, left = block[size:], left - size


def host_block(size: int) -> Tensor:
    """(size,) uint8 of host memory, page-locked where there is CUDA."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=uses_cuda())


class Offloaded:
    """Storages whose content waits in host memory."""

    def __init__(self, tensors: Sequence[Tensor], host: HostMemory) -> None:
        self._host = host
        self._storages = [(storage, storage.nbytes()) for storage in storages(tensors)]
        host.reserve(sum(size for _, size in self._storages))
        for memory, copy in self._pieces():
            copy.copy_(memory, non_blocking=True)
        _arrived()
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Bit for bit as before."""
        for storage, size in self._storages:
            storage.resize_(size)
        for memory, copy in self._pieces():
            memory.copy_(copy, non_blocking=True)
        _arrived()
        self._host.done()

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What lies in a storage, beside where it waits."""
        start = 0
        for storage, size in self._storages:
            copies = list(self._host.pieces(start, size))
            yield from zip(bytes_of(storage).split([copy.nbytes for copy in copies]), copies, strict=True)
            start += size


def _arrived() -> None:
    """Wait for all copies at once: neither side of one may go before."""
    if uses_cuda():
        torch.cuda.synchronize()


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of a storage, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
