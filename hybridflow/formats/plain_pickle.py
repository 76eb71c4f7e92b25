"""Unpickling that runs nothing: classes of the pickle become inert records.

What checkpoints of torch hold beside the payload are pickles. They are read here by Python's own unpickler (that of C
trusts numbers in the pickle with memory) without the opcodes that only other pickles need, and with names from an
allow-list alone, none of which leads to code.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

PREFIXES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
}
INERT = {  # classes and functions whose objects nothing here looks into
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
REFUSED = frozenset(
    opcode[0]
    for opcode in (
        *(pickle.INST, pickle.OBJ, pickle.PERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    )
)


class PickledObject:
    """An object of the pickle: the state as the pickle has it. The object runs nothing and keeps no arguments."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, kind: type) -> Any:
        """Errors: ValueError where there is no such field of that type."""
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {type(value).__name__}, must be {kind.__name__}")
        return value


class PickledIndex(PickledObject):
    """MetadataIndex, a key of dictionaries: the name of an entry and the offset of the chunk."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        name, offset = self.field("fqn", str), state.get("offset")
        if offset is not None and not (isinstance(offset, tuple) and all(type(n) is int for n in offset)):
            raise ValueError(f"the offset of {name!r} is no tuple of numbers")
        self.key = (name, offset)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledIndex) and self.key == other.key


class _Unpickler(pickle._Unpickler):
    dispatch = {code: step for code, step in pickle._Unpickler.dispatch.items() if code not in REFUSED}

    def __init__(self, data: bytes, plain: dict[tuple[str, str], Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._plain = plain
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        found = (module, name)
        if found in self._plain:
            return self._plain[found]
        if found in INERT:
            return PickledObject
        if module.startswith(PREFIXES) and name.isidentifier():
            return PickledIndex if name == "MetadataIndex" else PickledObject
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}, which is no part of a checkpoint")

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to objects outside of itself")
        return self._persistent(pid)


def load_plain(
    data: bytes, plain: dict[tuple[str, str], Any] | None = None, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The object in a pickle that may hold anything. `plain`: names beside the allow-list, and what they stand for.

    Errors: ValueError, for whatever is wrong with it.
    """
    try:
        return _Unpickler(data, PLAIN | (plain or {}), persistent).load()
    except Exception as error:  # damaged pickles fail in as many ways as there are opcodes
        raise ValueError(f"{type(error).__name__}: {error}") from error
