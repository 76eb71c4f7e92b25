"""`.metadata` of a torch.distributed.checkpoint directory: which tensors there are, and where their chunks lie.

tensor    global shape and dtype; chunks that cover it, each a box
chunk     offset and size in the tensor; file, first byte and length of the chunk's record, which torch.save wrote
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridflow.errors import CheckpointError
from hybridflow.formats.file_bytes import Shape, file_size, opened, read_bytes
from hybridflow.formats.plain_pickle import PickledIndex, PickledObject, load_plain
from hybridflow.formats.safetensors_files import MAX_ELEMENTS, TensorInfo

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
MAX_CELLS = 1 << 24

Storage = Mapping[object, object]  # as the file has it: PickledIndex -> PickledObject, if it is whole


class StoredChunk(NamedTuple):
    offset: Shape
    size: Shape
    file: Path
    start: int
    length: int


@dataclass
class StoredTensor:
    """A tensor and all chunks of the tensor, found by the leading dimensions in which every chunk has the size 1."""

    key: str
    info: TensorInfo
    chunks: list[StoredChunk]
    num_leading: int = 0
    by_leading: dict[Shape, list[StoredChunk]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        sizes = [{chunk.size[dim] for chunk in self.chunks} for dim in range(len(self.info.shape))]
        self.num_leading = next((dim for dim, size in enumerate(sizes) if size != {1}), len(sizes))
        for chunk in self.chunks:
            self.by_leading[chunk.offset[: self.num_leading]].append(chunk)

    def chunks_in(self, offset: Shape, size: Shape) -> Iterator[StoredChunk]:
        """Those that may have elements of a box."""
        ranges = [range(o, o + n) for o, n in zip(offset[: self.num_leading], size, strict=False)]
        for leading in product(*ranges):
            yield from self.by_leading.get(leading, ())

    def check_complete(self) -> None:
        """Errors: ValueError unless every element lies in exactly one chunk."""
        shape = self.info.shape
        held = sum(prod(chunk.size) for chunk in self.chunks)
        if held != prod(shape):
            raise ValueError(f"{self.key}: its chunks have {held} elements, shape {shape} has {prod(shape)}")
        for chunks in self.by_leading.values():
            again = _first_overlap(chunks)
            if again is not None:
                raise ValueError(f"{self.key}: the chunk at {again.offset} overlaps another")


def _first_overlap(chunks: Sequence[StoredChunk]) -> StoredChunk | None:
    """The first chunk that has an element of one before it: by the cells of a grid through all edges of chunks."""
    dims = range(len(chunks[0].offset))
    edges = [sorted({edge for c in chunks for edge in (c.offset[d], c.offset[d] + c.size[d])}) for d in dims]
    if len(chunks) < 2:
        return None
    if prod(map(len, edges)) > MAX_CELLS:
        return _first_overlap_by_pairs(chunks)
    number = [{edge: i for i, edge in enumerate(dim)} for dim in edges]
    taken = np.zeros([len(dim) for dim in edges], dtype=bool)
    for chunk in chunks:
        cells = tuple(
            slice(index[o], index[o + n]) for index, o, n in zip(number, chunk.offset, chunk.size, strict=True)
        )
        if taken[cells].any():
            return chunk
        taken[cells] = True
    return None


def _first_overlap_by_pairs(chunks: Sequence[StoredChunk]) -> StoredChunk | None:
    starts = np.array([chunk.offset for chunk in chunks])
    stops = starts + np.array([chunk.size for chunk in chunks])
    for i, chunk in enumerate(chunks):
        if ((starts[:i] < stops[i]) & (starts[i] < stops[:i])).all(axis=1).any():
            return chunk
    return None


def read_metadata(directory: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """(tensors, names of what is no tensor), by key. The files are there and long enough.

    Errors: CheckpointError, naming the file and where there is one the key, for whatever the directory holds.
    """
    file = directory / METADATA
    with opened(file) as fd:
        size = file_size(fd)
        if size > MAX_METADATA_BYTES:
            raise CheckpointError(f"{file}: has {size} bytes, at most {MAX_METADATA_BYTES} are read")
        data = read_bytes(fd, file, 0, size)
    try:
        tensors, objects = _parse(load_plain(data), directory)
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged or no metadata of a distributed checkpoint: {error}") from error
    _check_files(tensors.values())
    return tensors, objects


def _parse(root: object, directory: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    if not isinstance(root, PickledObject):
        raise ValueError(f"it holds {type(root).__name__}")
    storage: Storage = root.field("storage_data", dict)
    tensors, objects, files = {}, [], _Files(directory)
    for key, entry in root.field("state_dict_metadata", dict).items():
        if not isinstance(key, str) or not isinstance(entry, PickledObject):
            raise ValueError(f"an entry is {type(key).__name__}: {type(entry).__name__}")
        if not key.isprintable():
            raise ValueError(f"the key {key!r} is not printable")
        if isinstance(entry.state, dict) and "chunks" in entry.state:
            tensors[key] = _tensor(key, entry, storage, files)
        else:
            objects.append(key)
    return tensors, tuple(objects)


def _tensor(key: str, entry: PickledObject, storage: Storage, files: "_Files") -> StoredTensor:
    try:
        shape = _shape(entry.field("size", tuple))
        properties = entry.field("properties", PickledObject).state
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError("it has no dtype")
        chunks = [_chunk(key, chunk, shape, storage, files) for chunk in entry.field("chunks", list)]
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return StoredTensor(key, TensorInfo(shape, dtype), chunks)


def _chunk(key: str, chunk: object, shape: Shape, storage: Storage, files: "_Files") -> StoredChunk:
    if not isinstance(chunk, PickledObject):
        raise ValueError(f"a chunk is {type(chunk).__name__}")
    offset, size = _shape(chunk.field("offsets", tuple)), _shape(chunk.field("sizes", tuple))
    inside = len(offset) == len(size) == len(shape) and all(
        o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"the chunk at {offset} of size {size} is not inside of shape {shape}")
    index = PickledIndex()
    index.key = (key, offset)
    info = storage.get(index)
    if not isinstance(info, PickledObject):
        raise ValueError(f"the chunk at {offset} is in no file")
    if info.state.get("transform_descriptors"):
        raise ValueError(f"the chunk at {offset} is compressed or otherwise transformed")
    path, start, length = info.field("relative_path", str), info.field("offset", int), info.field("length", int)
    file = files[path]
    if file is None:
        raise ValueError(f"the chunk at {offset} is in the file {path!r}, outside of the directory")
    if not (0 <= start <= MAX_ELEMENTS and 0 < length <= MAX_ELEMENTS):
        raise ValueError(f"the chunk at {offset} is at byte {start} and {length} bytes long")
    return StoredChunk(offset, size, file, start, length)


class _Files(dict[str, Path | None]):
    """The files of a directory by the paths in the metadata; None for a path that leads out of the directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __missing__(self, path: str) -> Path | None:
        parts = Path(path).parts
        outside = not parts or Path(path).is_absolute() or ".." in parts or not path.isprintable()
        self[path] = None if outside else self._directory / path
        return self[path]


def _shape(value: tuple[Any, ...]) -> Shape:
    if not all(type(n) is int and n >= 0 for n in value) or len(value) > 16:
        raise ValueError("a shape or offset is not made of numbers")
    if prod(max(n, 1) for n in value) > MAX_ELEMENTS:
        raise ValueError(f"the shape or offset {value} is impossible")
    return value


def _check_files(tensors: Iterable[StoredTensor]) -> None:
    """The files are there, long enough, and no two chunks have the same bytes of them."""
    spans: dict[Path, list[tuple[int, int, str]]] = defaultdict(list)
    for tensor in tensors:
        for chunk in tensor.chunks:
            spans[chunk.file].append((chunk.start, chunk.start + chunk.length, tensor.key))
    for file, held in sorted(spans.items()):
        held.sort()
        for (_, end, key), (start, _, other) in pairwise(held):
            if start < end:
                raise CheckpointError(f"{file}: byte {start} belongs to {key} and to {other} by {METADATA}")
        try:
            with opened(file) as fd:
                size = file_size(fd)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {METADATA} lists it, with {held[0][2]}") from error
        _, end, key = held[-1]
        if size < end:
            raise CheckpointError(f"{file}: is damaged or cut short: it has {size} bytes, {key} ends at {end}")
