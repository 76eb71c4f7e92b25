"""The tensors of a torch_dist directory, read by the box.

The directory may come from any layout of ranks: a tensor is read by global indices, wherever the chunks lie.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_metadata import METADATA, StoredChunk, StoredTensor, read_metadata
from hybridflow.formats.file_bytes import Shape, file_size, opened, read_box, read_bytes
from hybridflow.formats.json_text import parse_json
from hybridflow.formats.safetensors_files import MAX_JSON_BYTES, TensorInfo
from hybridflow.formats.tensor_record import load_record, payload_start

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
