"""What autograd keeps for backward passes: the most bytes at a time, whatever of it are weights left out."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self
from weakref import WeakSet

import torch
from torch import Tensor


class _Entered:
    """Hooks of saved tensors hold while it is entered."""

    _hooks: torch.autograd.graph.saved_tensors_hooks

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


class KeptBytes(_Entered):
    """Counts saved tensors by their storage while it is entered. peak: bytes.

    weights: tensors whose storages are there anyway.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._uses: dict[int, int] = {}
        self._live = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> "_Held":
        return _Held(self, tensor)

    def note(self, tensor: Tensor, number: int) -> None:
        """One more use of its storage, or one less."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._weights:
            return
        before = self._uses.get(storage.data_ptr(), 0)
        self._uses[storage.data_ptr()] = before + number
        self._live += storage.nbytes() * ((before + number > 0) - (before > 0))
        self.peak = max(self.peak, self._live)


class _Held:
    """A saved tensor, until the graph is done with it."""

    def __init__(self, kept: KeptBytes, tensor: Tensor) -> None:
        self._kept, self.tensor = kept, tensor
        kept.note(tensor, 1)

    def __del__(self) -> None:
        self._kept.note(self.tensor, -1)


class HeldStorages(_Entered):
    """What autograd holds of what was saved while it was entered, in bytes of the storages as they are now.

    Unlike `KeptBytes` it may be entered again and again, and sees that a storage has been emptied.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._held: WeakSet[_Saved] = WeakSet()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> "_Saved":
        saved = _Saved(tensor)
        self._held.add(saved)
        return saved

    def num_bytes(self) -> int:
        storages = [saved.tensor.untyped_storage() for saved in self._held]
        sizes = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in self._weights}
        return sum(sizes.values())


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
