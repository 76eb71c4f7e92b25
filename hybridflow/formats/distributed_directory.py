"""The tensors of a torch_dist directory, read by the box.

The directory may come from any layout of ranks: a tensor is read by global indices, wherever the chunks lie. A record
of a file is the zip archive that torch.save made of one tensor:

    data.pkl    how the tensor is made of the storage: dtype, shape, strides
    data/0      the bytes of the storage, not compressed
"""

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_metadata import METADATA, StoredChunk, StoredTensor, read_metadata
from hybridflow.formats.file_bytes import Shape, file_size, opened, read_box, read_bytes
from hybridflow.formats.json_text import parse_json
from hybridflow.formats.plain_pickle import load_plain
from hybridflow.formats.safetensors_files import MAX_JSON_BYTES, TensorInfo

BACKEND = "torch_dist"
DESCRIPTION = "metadata.json"  # megatron's, beside DCP's .metadata


def is_distributed(path: str | Path) -> bool:
    """Whether a directory says that it is a torch_dist checkpoint.

    Errors: CheckpointError where the backend is another one, or metadata.json is damaged or alone missing.
    """
    file, metadata = Path(path) / DESCRIPTION, Path(path) / METADATA
    if not os.path.lexists(file):
        if os.path.lexists(metadata):
            raise CheckpointError(f"{file}: no such file, but there is {METADATA}: a torch_dist checkpoint has both")
        return False
    with opened(file) as fd:
        tree = parse_json(read_bytes(fd, file, 0, min(file_size(fd), MAX_JSON_BYTES)), f"{file}: is damaged: ")
    backend = tree.get("sharded_backend")
    if backend is not None and backend != BACKEND:
        raise CheckpointError(f"{file}: sharded_backend = {backend!r} is not supported, must be {BACKEND!r}")
    return backend == BACKEND


class DistributedDirectory:
    """The tensors of a torch_dist directory by megatron's keys.

    Errors: CheckpointError, naming the file and where there is one the key, for whatever the files hold.
    """

    tensors: Mapping[str, TensorInfo]
    objects: tuple[str, ...]  # keys of what is no tensor

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stored, self.objects = read_metadata(self.path)
        self.tensors = {key: stored.info for key, stored in self._stored.items()}
        self._complete: set[str] = set()
        self._starts: dict[tuple[Path, int], int | None] = {}  # of the payloads of records

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def file_of(self, key: str) -> Path:
        """The file of the tensor's first chunk."""
        stored = self._stored[key]
        return stored.chunks[0].file if stored.chunks else self.path / METADATA

    def read(self, key: str, offset: Shape, shape: Shape) -> Tensor:
        """A box of a tensor, as fresh memory."""
        if key not in self._stored:
            raise CheckpointError(f"{self.path / METADATA}: no tensor {key}")
        out = torch.empty(shape, dtype=self.tensors[key].dtype)
        self.read_into(key, offset, out)
        return out

    def read_into(self, key: str, offset: Shape, out: Tensor) -> None:
        """Fill `out`, which may be a view with strides, with the box of out's shape at `offset`."""
        stored, size = self._stored[key], tuple(out.shape)
        whole, shape = stored.info.shape, [o + n for o, n in zip(offset, size, strict=True)]
        if any(end > n for end, n in zip(shape, whole, strict=True)):
            raise CheckpointError(f"{self.path / METADATA}: {key} has shape {whole}, asked for {size} at {offset}")
        self.check_complete(key)
        for chunk in stored.chunks_in(offset, size):
            low = tuple(map(max, offset, chunk.offset))
            high = tuple(min(o + n, c + m) for o, n, c, m in zip(offset, size, chunk.offset, chunk.size, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
                self._read_chunk(stored, chunk, tuple(a - o for a, o in zip(low, chunk.offset, strict=True)), target)

    def check_complete(self, key: str) -> None:
        """Errors: CheckpointError unless the chunks cover the tensor and do not overlap."""
        if key not in self._complete:
            try:
                self._stored[key].check_complete()
            except ValueError as error:
                raise CheckpointError(f"{self.path / METADATA}: {error}") from error
            self._complete.add(key)

    def _read_chunk(self, stored: StoredTensor, chunk: StoredChunk, offset: Shape, out: Tensor) -> None:
        record, info = (chunk.start, chunk.length), TensorInfo(chunk.size, stored.info.dtype)
        with opened(chunk.file) as fd:
            try:
                place = (chunk.file, chunk.start)
                if place not in self._starts:
                    self._starts[place] = payload_start(fd, chunk.file, *record, info)
                start = self._starts[place]
                if start is None:
                    box = tuple(slice(o, o + n) for o, n in zip(offset, out.shape, strict=True))
                    out.copy_(load_record(fd, chunk.file, *record, info)[box])
                else:
                    read_box(fd, chunk.file, start, chunk.size, offset, out=out)
            except ValueError as error:
                raise CheckpointError(
                    f"{chunk.file}: {stored.key}, chunk at {chunk.offset}: is damaged: {error}"
                ) from error


LOCAL_HEADER_BYTES = 30
MAX_PICKLE_BYTES = 1 << 20
STORAGES = {
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "DoubleStorage"): torch.float64,
}


class _View(io.RawIOBase):
    """`length` bytes of an open file from `start` on, as a file."""

    def __init__(self, fd: int, file: Path, start: int, length: int) -> None:
        super().__init__()
        self._fd, self._file, self._start, self._length, self._position = fd, file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._position), 0)
        buffer[:count] = read_bytes(self._fd, self._file, self._start + self._position, count)
        self._position += count
        return count


def payload_start(fd: int, file: Path, start: int, length: int, info: TensorInfo) -> int | None:
    """Byte of the file where the tensor's elements start, one after the other; None if they lie there otherwise.

    Errors: ValueError where the record is damaged or holds another shape or dtype.
    """
    members = _members(_View(fd, file, start, length))
    pickled = _member(members, "/data.pkl")
    if pickled.file_size > MAX_PICKLE_BYTES:
        raise ValueError(f"data.pkl has {pickled.file_size} bytes")
    described = _tensor_in(read_bytes(fd, file, _data_start(fd, file, start, length, pickled), pickled.file_size))
    if described is None:
        return None
    name, dtype, num_stored, storage_offset, shape, strides = described
    if (shape, dtype) != (info.shape, info.dtype):
        raise ValueError(f"it holds {dtype} of shape {shape}, the metadata says {info.dtype} of shape {info.shape}")
    if storage_offset or num_stored != shape_numel(shape) or not _row_major(shape, strides):
        return None
    payload = _member(members, f"/data/{name}")
    if payload.file_size != num_stored * dtype.itemsize:
        raise ValueError(f"the payload has {payload.file_size} bytes, {dtype} of shape {shape} needs another number")
    return _data_start(fd, file, start, length, payload)


def load_record(fd: int, file: Path, start: int, length: int, info: TensorInfo) -> Tensor:
    """The whole tensor of a record, with any strides.

    Errors: ValueError where the record is damaged or holds another shape or dtype.
    """
    try:
        found = torch.load(io.BufferedReader(_View(fd, file, start, length)), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, none of them listed
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor) or (tuple(found.shape), found.dtype) != info:
        raise ValueError(f"it does not hold {info.dtype} of shape {info.shape}")
    return found


def shape_numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _members(view: _View) -> dict[str, zipfile.ZipInfo]:
    """The archive's members by their names without the archive's own."""
    try:
        with zipfile.ZipFile(view) as archive:
            return {info.filename[info.filename.find("/") :]: info for info in archive.infolist()}
    except CheckpointError:
        raise
    except Exception as error:  # zipfile lets through what it stumbles on in a damaged archive
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _member(members: dict[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    if name not in members:
        raise ValueError(f"no {name[1:]} in it")
    member = members[name]
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise ValueError(f"{name[1:]} is compressed")
    return member


def _data_start(fd: int, file: Path, start: int, length: int, member: zipfile.ZipInfo) -> int:
    """Byte of the file where the data of a member starts: after the local header, name and extra field."""
    if not 0 <= member.header_offset <= length - LOCAL_HEADER_BYTES:
        raise ValueError(f"{member.filename} starts outside of the record")
    header = read_bytes(fd, file, start + member.header_offset, LOCAL_HEADER_BYTES)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"{member.filename} has no header")
    name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    first = member.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if first + member.file_size > length:
        raise ValueError(f"{member.filename} ends outside of the record")
    return start + first


def _tensor_in(data: bytes) -> tuple[str, torch.dtype, int, int, Shape, Shape] | None:
    """(storage, dtype, elements in the storage, first element, shape, strides); None for what is not one tensor."""
    names = {("torch._utils", "_rebuild_tensor_v2"): lambda *args: ("tensor", *args), **STORAGES}
    try:
        found = load_plain(data, names, persistent=lambda pid: pid)
        kind, storage, first, shape, strides, *_ = found
        label, dtype, name, _, num_stored = storage
    except (ValueError, TypeError):
        return None
    numbers = (
        (num_stored, first, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (-1,)
    )
    plain = (kind, label) == ("tensor", "storage") and isinstance(dtype, torch.dtype) and str(name).isalnum()
    if not plain or not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers):
        return None
    return name, dtype, num_stored, first, shape, strides


def _row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return len(shape) == len(strides)
