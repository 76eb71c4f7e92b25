"""The weights of a model as the chunks of a torch_dist checkpoint, each read when it is written.

Before anything is written two things are checked, not assumed: the chunks read every row of every HuggingFace tensor
once, and write every element of every megatron parameter once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hybridflow.architecture.parts import Block, blocks, whole_shape
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight
from hybridflow.architecture.weights import stored_at
from hybridflow.convert.processes import Processes
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_storage import Chunk
from hybridflow.formats.safetensors_files import TensorInfo


class WeightFiles(Protocol):
    """Tensors by their HuggingFace names."""

    def read(self, name: str, shape: Shape, rows: slice) -> Tensor:
        """Rows of the tensor `name`, whose full shape must be `shape`."""

    def file_of(self, name: str) -> Path:
        """For messages."""


def make_chunks(
    weights: Sequence[Weight], spec: ModelSpec, files: WeightFiles, infos: Mapping[str, TensorInfo]
) -> list[Chunk]:
    """infos: of every part of the weights. Errors: CheckpointError, see above, or where dtypes differ within a key."""
    names = Counter(name for weight in weights for name in weight.hf)
    assert names == Counter(infos.keys()), (
        f"used: {names - Counter(infos.keys())}, left: {Counter(infos.keys()) - names}"
    )
    _check_dtypes(weights, files, infos)
    chunks = [chunk for weight in weights for chunk in _chunks(weight, spec, files, infos)]
    _check_written_once(chunks)
    return chunks


def own_share(chunks: Sequence[Chunk], processes: Processes) -> list[Chunk]:
    """This process's run of neighbouring chunks: about an equal share of the bytes."""
    total, start, own = sum(chunk.num_bytes for chunk in chunks), 0, []
    for chunk in chunks:
        middle = start + chunk.num_bytes / 2
        if int(middle * processes.count / total) == processes.rank:
            own.append(chunk)
        start += chunk.num_bytes
    return own


def _chunks(weight: Weight, spec: ModelSpec, files: WeightFiles, infos: Mapping[str, TensorInfo]) -> Iterator[Chunk]:
    """One a block, at the block's place in the tensor of the weight's key."""
    (key, layer), whole, shapes = stored_at(weight), whole_shape(weight, spec), weight.shapes(spec)
    found = blocks(weight, spec)
    _check_read_once(weight, found, shapes)
    for block in found:
        offset, shape = _box(block, whole)
        if layer is not None:
            offset, shape = (layer, *offset), (1, *shape)
        rows = slice(block.start, block.start + block.rows)
        yield Chunk(
            key=key,
            offset=offset,
            shape=shape,
            whole=whole if layer is None else (spec.num_layers, *whole),
            dtype=infos[weight.hf[0]].dtype,
            read=partial(_read, files, weight.hf[block.part], shapes[block.part], rows, chunk_shape=shape),
        )


def _box(block: Block, whole: Shape) -> tuple[Shape, Shape]:
    """(offset, shape) of a block in the whole parameter. Rows run through the parameter's leading dimensions."""
    if len(whole) == 1:
        return (block.row,), (block.rows,)
    *experts, num_rows, columns = whole
    expert, row = divmod(block.row, num_rows)
    assert row + block.rows <= num_rows, f"{block} crosses the {num_rows} rows of an expert"
    return (*([expert] if experts else []), row, 0), (*([1] if experts else []), block.rows, columns)


def _read(files: WeightFiles, name: str, shape: Shape, rows: slice, chunk_shape: Shape) -> Tensor:
    return files.read(name, shape, rows).view(chunk_shape)


# ---------------------------------------------------------------------------------------------------- the checks


def _check_dtypes(weights: Sequence[Weight], files: WeightFiles, infos: Mapping[str, TensorInfo]) -> None:
    """A key is one tensor with one dtype, over all layers and parts."""
    first: dict[str, str] = {}
    for weight in weights:
        key, _ = stored_at(weight)
        for name in weight.hf:
            other = first.setdefault(key, name)
            if infos[name].dtype != infos[other].dtype:
                raise CheckpointError(
                    f"{files.file_of(name)}: {name} is {infos[name].dtype}, but {other} is {infos[other].dtype}: "
                    f"they are stored as one tensor, {key}"
                )


def _check_read_once(weight: Weight, found: Iterable[Block], shapes: Sequence[Shape]) -> None:
    spans: list[list[tuple[int, int]]] = [[] for _ in shapes]
    for block in found:
        spans[block.part].append((block.start, block.start + block.rows))
    for part, shape in enumerate(shapes):
        if problem := _not_tiled(spans[part], shape[0]):
            raise CheckpointError(f"{weight.hf[part]}: by the table of weights its rows {problem} once")


def _check_written_once(chunks: Iterable[Chunk]) -> None:
    """Chunks have whole rows, so each is a run of the elements of one key in their order."""
    by_key: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_key[chunk.key].append(chunk)
    for key, group in by_key.items():
        assert len({(chunk.whole, chunk.dtype) for chunk in group}) == 1, f"{key}: {group}"
        spans = [(start := _position(chunk), start + prod(chunk.shape)) for chunk in group]
        if problem := _not_tiled(spans, prod(group[0].whole)):
            raise CheckpointError(f"{key}: by the table of weights its elements {problem} once")


def _position(chunk: Chunk) -> int:
    """The place of the chunk's first element among the elements of the key."""
    position = 0
    for offset, size in zip(chunk.offset, chunk.whole, strict=True):
        position = position * size + offset
    return position


def _not_tiled(spans: list[tuple[int, int]], size: int) -> str:
    """Where the spans do not cover 0 .. size once; empty where they do."""
    reached = 0
    for start, stop in [*sorted(spans), (size, size)]:
        if start > reached:
            return f"{reached} .. {start - 1} are not used"
        if start < reached:
            return f"{start} .. {reached - 1} are used more than"
        reached = stop
    return ""
