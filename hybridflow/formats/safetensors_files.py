"""Safetensors files of a HuggingFace directory, read by the slice.

A file is 8 bytes (the length of the header), the header (JSON: dtype, shape and byte range of every tensor) and the
tensors one after the other. Every header is checked against the file and the index when the directory is opened. No
file stays open or mapped: a read copies the bytes into new memory.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats.file_bytes import Shape, file_size, opened, read_box, read_bytes
from hybridflow.formats.json_text import parse_json

ALL = slice(None)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 100_000_000  # of a header or an index
MAX_ELEMENTS = 1 << 60
READABLE = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
QUANTISED = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0")


class TensorInfo(NamedTuple):
    shape: Shape
    dtype: torch.dtype


class HeaderEntry(NamedTuple):
    """A tensor of one file."""

    file: Path
    start: int  # byte in the file
    info: TensorInfo


class SafetensorsDirectory:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json lists.

    Errors: CheckpointError, naming the file and where there is one the tensor, for whatever the files hold.
    """

    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        index = self.path / INDEX
        listed = read_index(index) if _exists(index) else None
        names = [SINGLE] if listed is None else sorted(set(listed.values()))
        if listed is None:
            _check_single(self.path)
        else:
            _check_files(index, listed)
        self._files = [self.path / name for name in names]
        self._entries: dict[str, HeaderEntry] = {}
        for file in self._files:
            for name, entry in read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(f"{file}: {name} is in {self._entries[name].file.name} too")
                self._entries[name] = entry
        if listed is not None:
            _check_index(index, listed, self._entries)
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def cut(self, name: str, shape: Shape, pieces: Mapping[str, Shape]) -> None:
        """Have these tensors in the place of `name`, whose full shape must be `shape`: they lie in it one by one."""
        file, start, info = self._entries[name]
        check_readable(file, name, info, shape)
        assert sum(map(prod, pieces.values())) == prod(shape), f"{name}: {shape} is not made of {list(pieces.values())}"
        del self._entries[name]
        for piece, size in pieces.items():
            if piece in self._entries:
                raise CheckpointError(f"{file}: has {name}, and {piece} besides")
            self._entries[piece] = HeaderEntry(file, start, TensorInfo(size, info.dtype))
            start += prod(size) * info.dtype.itemsize
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def rename(self, beginning: str, other: str) -> None:
        """Have the tensors whose names begin so by names that begin otherwise. Errors: CheckpointError."""
        for name in [name for name in self._entries if name.startswith(beginning)]:
            renamed = other + name.removeprefix(beginning)
            if renamed in self._entries:
                raise CheckpointError(f"{self._entries[name].file}: has {name}, and {renamed} besides")
            self._entries[renamed] = self._entries.pop(name)
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def file_of(self, name: str) -> Path:
        return self._entries[name].file

    def sample(self, name: str, offset: Shape, size: Shape) -> Tensor:
        """A box of a tensor, of any number of dimensions and any dtype, as fresh memory."""
        return read_part(self._entries[name], offset, size)

    def read(self, name: str, shape: Shape, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """Rows (dim 0) and columns (dim 1) of tensor `name`, whose full shape must be `shape`, as fresh memory."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: no tensor {name} in {', '.join(f.name for f in self._files)}")
        return read_entry(self._entries[name], name, shape, rows, columns)


def read_entry(entry: HeaderEntry, name: str, shape: Shape, rows: slice, columns: slice) -> Tensor:
    """Rows (dim 0) and columns (dim 1) of a tensor, whose full shape must be `shape`, as fresh memory."""
    check_readable(entry.file, name, entry.info, shape)
    return read_part(entry, *box_of(shape, rows, columns))


def read_part(entry: HeaderEntry, offset: Shape, size: Shape) -> Tensor:
    """A box of a tensor, as `box_of` gives it, of any dtype."""
    file, start, info = entry
    out = torch.empty(size, dtype=info.dtype)
    with opened(file) as fd:
        read_box(fd, file, start, info.shape, offset, out=out)
    return out


def check_readable(file: Path, name: str, info: TensorInfo, shape: Shape) -> None:
    """Errors: CheckpointError where a tensor has another shape, or is no weight in floating point."""
    if info.shape != tuple(shape):
        raise CheckpointError(f"{file}: {name} has shape {info.shape}, config.json asks for {tuple(shape)}")
    if info.dtype not in READABLE:
        named = NAMES.get(info.dtype, str(info.dtype))
        hint = "; the checkpoint looks quantised" if named in QUANTISED else ""
        raise CheckpointError(f"{file}: {name} is {named}; float32, bfloat16 and float16 weights can be read{hint}")


def box_of(shape: Shape, rows: slice, columns: slice) -> tuple[Shape, Shape]:
    """(offset, size) of these rows and columns of a tensor; a vector has one column."""
    slices = [rows, columns][: len(shape)] + [ALL] * (len(shape) - 2)
    assert len(shape) > 1 or len(range(1)[columns]) == 1, f"columns {columns} of a tensor of shape {shape}"
    ranges = [range(n)[part] for n, part in zip(shape, slices, strict=True)]
    assert all(r.step == 1 for r in ranges), f"steps other than 1: {rows}, {columns}"
    return tuple(r.start for r in ranges), tuple(map(len, ranges))


# --------------------------------------------------------------------------------------------------- which files


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


def _names(directory: Path) -> list[str]:
    try:
        return sorted(file.name for file in directory.iterdir())
    except OSError:
        return []


def _check_single(directory: Path) -> None:
    """Say what a directory without an index has in the place of model.safetensors."""
    file, names = directory / SINGLE, _names(directory)
    if SINGLE in names:
        return
    shards = [name for name in names if _is_shard(name)]
    if shards:
        raise CheckpointError(f"{directory / INDEX}: no such file, but there is {shards[0]}: its index is missing")
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth")) and name != "training_args.bin"]
    if pickled:
        raise CheckpointError(
            f"{directory / pickled[0]}: pickled weights are refused, because loading them can run code; in a place "
            "where you trust them load the model with transformers and save_pretrained it: that writes safetensors"
        )
    raise CheckpointError(f"{file}: no such file; weights are read from safetensors")


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def read_index(index: Path) -> dict[str, str]:
    """weight_map: tensor -> file name in the same directory."""
    wrong = f"{index}: is no index of safetensors files: "
    with opened(index) as fd:
        size = file_size(fd)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{wrong}it has {size} bytes")
        tree = parse_json(read_bytes(fd, index, 0, size), wrong)
    listed = tree.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{wrong}weight_map is {type(listed).__name__}, must be an object with entries")
    for name, file in listed.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and file.isprintable()
        if not plain or "/" in file or "\\" in file:
            raise CheckpointError(f"{wrong}{name} is in {file!r}, which is no name of a safetensors file beside it")
    return listed


def _check_files(index: Path, listed: dict[str, str]) -> None:
    """Every listed file is there, and no other file that may hold weights of the model."""
    present = set(_names(index.parent))
    first = {file: name for name, file in reversed(listed.items())}
    for file, name in sorted(first.items()):
        if file not in present:
            raise CheckpointError(
                f"{index.parent / file}: no such file; {index.name} lists it, with {name} and "
                f"{sum(value == file for value in listed.values()) - 1} more tensors"
            )
    others = sorted(file for file in present - first.keys() if file == SINGLE or _is_shard(file))
    if others:
        raise CheckpointError(
            f"{index.parent / others[0]}: {index.name} does not list this file, so it is not clear which weights are "
            "the model's; remove the one that is not"
        )


def _check_index(index: Path, listed: dict[str, str], entries: dict[str, HeaderEntry]) -> None:
    """Index and headers say the same."""
    for name, file in listed.items():
        if name not in entries:
            raise CheckpointError(f"{index.parent / file}: no tensor {name} in it, which {index.name} says is there")
        if entries[name].file.name != file:
            raise CheckpointError(f"{entries[name].file}: {name} is here, {index.name} says it is in {file}")
    for name, entry in entries.items():
        if name not in listed:
            raise CheckpointError(f"{entry.file}: holds {name}, which {index.name} does not list")


# --------------------------------------------------------------------------------------------------- headers


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """The tensors of a safetensors file in the order of their bytes, which must fill the file."""
    wrong = f"{file}: is damaged or cut short: "
    with opened(file) as fd:
        size = file_size(fd)
        length = int.from_bytes(read_bytes(fd, file, 0, 8), "little") if size >= 8 else 0
        if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
            raise CheckpointError(f"{wrong}its header has {length} bytes, the file {size}")
        header = parse_json(read_bytes(fd, file, 8, length), wrong)
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(x, str) for x in notes.values()):
        raise CheckpointError(f"{wrong}__metadata__ is no object of strings")
    spans = {name: _checked_entry(f"{wrong}{name}", entry) for name, entry in header.items()}
    position, entries = 0, {}
    for name, (info, start, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start != position:
            raise CheckpointError(f"{wrong}{name} starts at byte {start}, the tensor before it ends at {position}")
        entries[name] = HeaderEntry(file, 8 + length + start, info)
        position = stop
    if 8 + length + position != size:
        raise CheckpointError(f"{wrong}it has {size} bytes, its header asks for {8 + length + position}")
    return entries


def _checked_entry(wrong: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """(info, first byte, end) of one tensor of a header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{wrong} has not dtype, shape and data_offsets: {_short(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{wrong} has dtype {_short(dtype)}; known are {', '.join(DTYPES)}")
    if not _are_counts(shape) or len(shape) > 8 or prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{wrong} has the impossible shape {_short(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{wrong} has the impossible data_offsets {_short(offsets)}")
    num_bytes = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise CheckpointError(f"{wrong} has {num_bytes} bytes by dtype and shape, data_offsets are {offsets}")
    return TensorInfo(tuple(shape), DTYPES[dtype]), offsets[0], offsets[1]


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
