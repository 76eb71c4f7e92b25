"""Write records of torch.distributed.checkpoint (DCP) one chunk at a time: planner and writer with lazy tensors.

DCP's own `FileSystemWriter` keeps the last tensor of every key until the file is complete, and DCP's planner wants all
tensors at hand. Seen in torch 2.13. `save` is DCP's, with its collectives; `write_records` and `write_metadata` are the
same without any, for ranks that write in the background and share the places of records by other means.
"""

import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hybridflow.errors import CheckpointError
from hybridflow.formats.directories import FileSum, sync
from hybridflow.formats.distributed_metadata import METADATA, StoredChunk, StoredTensor
from hybridflow.formats.file_bytes import Shape, memory_of, start_writing
from hybridflow.formats.safetensors_files import TensorInfo

EMPTY = [None]  # as megatron stores an object that is None
Written = Callable[[int], None]  # gets the bytes of each tensor once it is written


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, read when it is written."""

    key: str
    offset: Shape
    shape: Shape
    whole: Shape  # shape of the tensor
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ChunkRecord:
    """Where a chunk lies, or under `key` alone no object: then shape, whole and dtype say nothing."""

    key: str
    offset: Shape | None
    shape: Shape
    whole: Shape
    dtype: str  # of torch, by name
    file: str
    start: int
    length: int


def write_records(
    directory: Path, name: str, chunks: Iterable[Chunk], empty: Sequence[str] = (), written: Written = lambda size: None
) -> tuple[list[ChunkRecord], FileSum]:
    """Write DIRECTORY/NAME, which is on the disk when this returns: the chunks, and under the keys `empty` no object.

    Errors: those of `Chunk.read`; CheckpointError naming the file where it cannot be written.
    """
    records = []
    with _summed(directory / name) as file:
        for chunk in chunks:
            start = file.tell()
            tensor = _tensor_of(chunk)
            _save(tensor, file)
            what, dtype = (chunk.key, chunk.offset, chunk.shape, chunk.whole), str(chunk.dtype)[6:]
            records.append(ChunkRecord(*what, dtype=dtype, file=name, start=start, length=file.tell() - start))
            written(tensor.nbytes)
        for key in empty:
            start = file.tell()
            _save(EMPTY, file)
            records.append(ChunkRecord(key, None, (), (), "", file=name, start=start, length=file.tell() - start))
    return records, FileSum(file.tell(), file.crc32)


def write_metadata(directory: Path, records: Iterable[ChunkRecord]) -> None:
    """DIRECTORY/.metadata, on the disk when this returns. Errors: ValueError unless chunks cover every tensor once."""
    results, items = [], []
    for record in records:
        offset = None if record.offset is None else torch.Size(record.offset)
        index = MetadataIndex(record.key, offset)
        results.append(WriteResult(index, record.length, _StorageInfo(record.file, record.start, record.length)))
        if record.offset is None:
            items.append(WriteItem(index, WriteItemType.BYTE_IO))
        else:
            dtype = getattr(torch, record.dtype)
            items.append(_write_item(record.key, record.offset, record.shape, record.whole, dtype))
    _Writer(directory, lambda num_bytes: None).finish(_metadata(items), [results])


class _SummedFile:
    """A file as torch.save wants it, that knows the CRC-32 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.name, self.crc32, self._position = file, file.name, 0, 0

    def write(self, data: bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        start, self._position = self._position, self._position + memoryview(data).nbytes
        written = self._file.write(data)
        start_writing(self._file.fileno(), start, self._position)
        return written

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        self._file.flush()


@contextmanager
def _summed(path: Path) -> Iterator[_SummedFile]:
    try:
        with path.open("wb") as file:
            yield _SummedFile(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


def save(
    directory: Path,
    chunks: Sequence[Chunk],
    empty: Sequence[str],
    group: ProcessGroup | None,
    written: Written,
) -> None:
    """DCP's save: every rank of the group writes items, and no object under the keys `empty`; the first, the metadata.

    Errors: what reading or writing an item raised on any rank, on every rank.
    """
    planner = _Planner(chunks, empty)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # without a group that is meant
        try:
            save_checkpoint(
                {},
                storage_writer=_Writer(directory, written),
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
        except CheckpointException as error:  # DCP collects the ranks' exceptions in one that is no Exception
            first = min(error.failures)
            raise error.failures[first][0] from error


class _WithoutChecksums(torch.serialization._open_zipfile_writer_buffer):
    """Ten times as fast; what is written without them torch.load reads like any other.

    torch's switch is one for all threads, and others may be inside torch.save.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        alignment = torch.serialization._get_storage_alignment()
        self.file_like = torch._C.PyTorchFileWriter(buffer, False, alignment)


class _Planner(SavePlanner):
    """Plans from shapes and dtypes; a tensor is made just before the tensor is written."""

    def __init__(self, items: Sequence[Chunk], empty: Sequence[str]) -> None:
        self._empty = empty
        self._items = {(item.key, item.offset): item for item in items}
        assert len(self._items) == len(items), "two chunks of one tensor at the same place"

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._empty]
        chunks = self._items.values()
        return SavePlan([_write_item(x.key, x.offset, x.shape, x.whole, x.dtype) for x in chunks] + objects)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, _metadata([item for plan in all_plans for item in plan.items])

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.offset is not None, f"{index.fqn} is no chunk of a tensor"
        return _tensor_of(self._items[index.fqn, tuple(index.offset)])


def _tensor_of(item: Chunk) -> Tensor:
    """On the CPU, in a storage of the tensor's size: torch.save writes the whole storage."""
    tensor = item.read().detach().cpu().contiguous()
    assert (tuple(tensor.shape), tensor.dtype) == (item.shape, item.dtype), (
        f"{item.key}: {tensor.dtype} {tuple(tensor.shape)}, planned {item.dtype} {item.shape}"
    )
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return (
        torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape) if tensor.nbytes else tensor.clone()
    )


def _metadata(items: Sequence[WriteItem]) -> Metadata:
    """Of what all ranks write. Errors: ValueError unless it covers every tensor once."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for key, data in sorted(
        ((item.index.fqn, item.tensor_data) for item in items if item.tensor_data),
        key=lambda entry: (entry[0], entry[1].chunk.offsets),
    ):
        stored = tensors.setdefault(key, TensorStorageMetadata(data.properties, data.size, []))
        if (stored.size, stored.properties.dtype) != (data.size, data.properties.dtype):
            raise ValueError(f"{key}: its chunks are of tensors of {stored.size} and {data.size}")
        stored.chunks.append(data.chunk)
    for key, stored in tensors.items():
        chunks = [StoredChunk(tuple(c.offsets), tuple(c.sizes), Path(), 0, 0) for c in stored.chunks]
        StoredTensor(key, TensorInfo(tuple(stored.size), stored.properties.dtype), chunks).check_complete()
    objects = sorted(item.index.fqn for item in items if not item.tensor_data)
    return Metadata({**tensors, **{key: BytesStorageMetadata() for key in objects}})


def _write_item(key: str, offset: Shape, shape: Shape, whole: Shape, dtype: torch.dtype) -> WriteItem:
    return WriteItem(
        MetadataIndex(key, offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)), TensorProperties(dtype), torch.Size(whole)
        ),
    )


def _save(value: object, file: Any) -> None:
    try:
        with _WithoutChecksums(file) as writer:
            torch.serialization._save(value, writer, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    except (RuntimeError, OSError) as error:  # torch's own error hides that of the disk
        cause = error if isinstance(error, OSError) else error.__context__
        raise CheckpointError(f"{file.name}: cannot be written: {cause or error}") from error


class _Writer(FileSystemWriter):
    """One file a rank, the same bytes for the same chunks."""

    def __init__(self, directory: Path, written: Written) -> None:
        super().__init__(directory)
        self._directory, self._written = directory, written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with (self._directory / name).open("wb") as file:
            for item in plan.items:
                start, num_bytes = file.tell(), self._write_item(item, planner, file)
                length = file.tell() - start
                start_writing(file.fileno(), start, start + length)
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                if num_bytes is not None:
                    self._written(num_bytes)
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_item(self, item: WriteItem, planner: SavePlanner, file: BinaryIO) -> int | None:
        """Bytes of the tensor, which is gone before the next is read; None where there is no tensor."""
        if item.type is WriteItemType.BYTE_IO:
            _save(EMPTY, file)
            return None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor), f"{item.index.fqn}: {type(tensor).__name__}"
        _save(tensor, file)
        return tensor.nbytes

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        sync(self._directory / METADATA)  # torch syncs the file before the last bytes have left Python's buffer

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # neither the path nor a random identity
