"""A device that never was: addresses, pages and a capacity, over host memory."""

import ctypes

import torch
from torch import Tensor

from hybridflow.reshard.reserved import Reserved

GARBAGE = 0xFF  # four of it are a NaN


class SimulatedDevice:
    """`AddressSpace` that refuses what a driver would, and counts.

    cached: bytes that others hold without use, until they are asked. mapped: address -> size.
    """

    def __init__(self, page_bytes: int = 256, capacity: int = 1 << 40) -> None:
        self.page_bytes, self.capacity, self.cached = page_bytes, capacity, 0
        self.mapped: dict[int, int] = {}
        self.peak = self.num_maps = self.num_reclaims = 0
        self._reserved: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.mapped.values())

    @property
    def num_reserved(self) -> int:
        return len(self._reserved)

    def reserve(self, size: int) -> int:
        assert size > 0 and size % self.page_bytes == 0
        memory = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(memory)
        self._reserved[address] = memory
        return address

    def map(self, address: int, size: int) -> None:
        assert len(self._reserved[address]) == size and address not in self.mapped
        if self.num_bytes + self.cached + size > self.capacity:
            raise torch.OutOfMemoryError(f"{size} bytes")
        self.mapped[address] = size
        self.num_maps += 1
        self.peak = max(self.peak, self.num_bytes)

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        ctypes.memset(address, GARBAGE, size)

    def free(self, address: int, size: int) -> None:
        assert address not in self.mapped and len(self._reserved.pop(address)) == size

    def reclaim(self) -> None:
        self.cached = 0
        self.num_reclaims += 1

    def tensor(self, owner: Reserved) -> Tensor:
        assert owner.address in self.mapped

        class Window(ctypes.c_ubyte * owner.num_bytes):  # type: ignore[misc]
            keeps: Reserved

        window = Window.from_address(owner.address)
        window.keeps = owner
        return torch.frombuffer(window, dtype=torch.uint8)
