"""Addresses that stay while the memory under them comes and goes: for weights that the engine gathers.

A CUDA graph replays with the addresses that it was captured with. Weights that are gathered have memory only while the
engine generates; taken from torch's allocator it lies elsewhere each time, and the engine would have to do without
graphs. So a range of addresses is reserved once, and memory is mapped into it for each hand-off (`AddressSpace`; that
of a GPU is in `device_memory`). A training storage that is released meanwhile is another matter: megatron holds it by
torch's storage, and no tensor of the engine lies in it (`WeightReshard`).

Without graphs nothing keeps addresses, and memory stays with torch (`memory.Resized`).
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    Finalizer: TypeAlias = weakref.finalize[[int, int], "Reserved"]


class AddressSpace(Protocol):
    """Of one device. Sizes are multiples of `page_bytes`; addresses are those that `reserve` gave, with their sizes."""

    page_bytes: int

    def reserve(self, size: int) -> int:
        """An address from which on `size` bytes are nobody else's. There is no memory there yet."""

    def map(self, address: int, size: int) -> None:
        """Memory at a reserved address, of any content. Errors: torch.OutOfMemoryError, and nothing is mapped."""

    def unmap(self, address: int, size: int) -> None:
        """The memory goes back to the device after the device's queued work; the content is lost."""

    def free(self, address: int, size: int) -> None:
        """Give up the addresses. Nothing is mapped there."""

    def reclaim(self) -> None:
        """Have others give back to the device what they hold without use."""

    def tensor(self, owner: "Reserved") -> Tensor:
        """The bytes of a range that is mapped, as uint8. It keeps `owner` alive, as does every view of it."""


class Reserved:
    """`num_bytes` at an address that stays, mapped or not. Not mapped at first.

    The addresses are given up, and what is mapped there, when neither this object nor a tensor over it is left.
    size: bytes that it takes of the device while it is mapped: whole pages.
    """

    def __init__(self, num_bytes: int, space: AddressSpace) -> None:
        assert num_bytes > 0, "no address is reserved for nothing"
        self.num_bytes, self._space = num_bytes, space
        self.size = -(-num_bytes // space.page_bytes) * space.page_bytes
        self.address = space.reserve(self.size)
        _when_gone(self, space.free, self.address, self.size)
        self._unmap: Finalizer | None = None

    @property
    def is_mapped(self) -> bool:
        return self._unmap is not None

    def map(self) -> None:
        """Errors: torch.OutOfMemoryError, where there is no room either when others have given back what they can."""
        assert not self.is_mapped, f"{self.size} bytes at {self.address:#x} are mapped already"
        try:
            self._space.map(self.address, self.size)
        except torch.OutOfMemoryError:  # torch's allocator keeps what it was given back, as it would for itself
            self._space.reclaim()
            self._space.map(self.address, self.size)
        self._unmap = _when_gone(self, self._space.unmap, self.address, self.size)  # runs before the one made earlier

    def unmap(self) -> None:
        assert self._unmap is not None, f"{self.size} bytes at {self.address:#x} are not mapped"
        unmap, self._unmap = self._unmap, None
        unmap()

    def tensor(self) -> Tensor:
        """(num_bytes,) uint8. It must be mapped when this is asked; the tensor stays valid when it is so again."""
        assert self.is_mapped, "torch asks the device whose memory it is"
        return self._space.tensor(self)


def _when_gone(owner: Reserved, work: Callable[[int, int], None], address: int, size: int) -> "Finalizer":
    """Not when the program ends: the driver may then be gone before."""
    finalizer = weakref.finalize(owner, work, address, size)
    finalizer.atexit = False
    return finalizer
