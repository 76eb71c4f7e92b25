"""Write records of torch.distributed.checkpoint one chunk at a time: its planner and its writer with lazy tensors.

DCP's own `FileSystemWriter` keeps the last tensor of every key until its file is complete, and DCP's planner wants all
tensors at hand. Seen in torch 2.13.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from hybridflow.formats.distributed_metadata import StoredChunk, StoredTensor
from hybridflow.formats.file_bytes import Shape, start_writing
from hybridflow.formats.safetensors_files import TensorInfo

EMPTY = [None]  # as megatron stores an object that is None


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, read when it is written."""

    key: str
    offset: Shape
    shape: Shape
    whole: Shape  # shape of the tensor
    dtype: torch.dtype
    read: Callable[[], Tensor]


def save(
    directory: Path,
    chunks: Sequence[Chunk],
    empty: Sequence[str],
    group: ProcessGroup | None,
    written: Callable[[int], None],
) -> None:
    """DCP's save: every rank of the group its items and under the keys `empty` no object, the first the metadata.

    Errors: what reading or writing an item raised on any rank, on every rank.
    """
    planner = _Planner(chunks, empty)
    with _without_checksums(), warnings.catch_warnings():
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


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Ten times as fast; what torch.save has written without them torch.load reads like any other."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Planner(SavePlanner):
    """Plans from shapes and dtypes; a tensor comes to be when its turn to be written has come."""

    def __init__(self, items: Sequence[Chunk], empty: Sequence[str]) -> None:
        self._empty = empty
        self._items = {(item.key, item.offset): item for item in items}
        assert len(self._items) == len(items), "two chunks of one tensor at the same place"

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._empty]
        return SavePlan([_write_item(item) for item in self._items.values()] + objects)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        items = [item for plan in all_plans for item in plan.items]
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
        return all_plans, Metadata({**tensors, **{key: BytesStorageMetadata() for key in objects}})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.offset is not None, f"{index.fqn} is no chunk of a tensor"
        item = self._items[index.fqn, tuple(index.offset)]
        tensor = item.read().detach().cpu().contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == (item.shape, item.dtype), (
            f"{item.key}: {tensor.dtype} {tuple(tensor.shape)}, planned {item.dtype} {item.shape}"
        )
        # torch.save writes the whole storage
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_item(item: Chunk) -> WriteItem:
    return WriteItem(
        MetadataIndex(item.key, item.offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.shape)),
            TensorProperties(item.dtype),
            torch.Size(item.whole),
        ),
    )


def _save(value: object, file: BinaryIO) -> None:
    try:
        torch.save(value, file)
    except (RuntimeError, OSError) as error:  # torch's own error hides that of the disk
        cause = error if isinstance(error, OSError) else error.__context__
        raise CheckpointError(f"{file.name}: cannot be written: {cause or error}") from error


class _Writer(FileSystemWriter):
    """One file a rank, the same bytes for the same chunks."""

    def __init__(self, directory: Path, written: Callable[[int], None]) -> None:
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

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # neither the path nor a random identity
