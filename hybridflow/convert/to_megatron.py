"""A HuggingFace directory becomes a torch_dist checkpoint of megatron-core, which loads on any layout.

Each weight is read block by block, at the moment when the block is written: no more than one is in memory. Two things
are checked before: the chunks read every row of every HuggingFace tensor once, and write every element of every
megatron parameter once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor

from hybridflow.architecture.parts import Block, blocks, whole_shape
from hybridflow.architecture.spec import Head, ModelSpec, config_changes
from hybridflow.architecture.tables import LM_HEAD, VALUE_HEAD
from hybridflow.architecture.weight import Shape, Weight
from hybridflow.architecture.weight_files import write_distributed
from hybridflow.architecture.weights import embedding, model_weights, stored_at
from hybridflow.convert.output import check_target, new_directory, write_companions
from hybridflow.convert.processes import ALONE, Processes
from hybridflow.convert.progress import ByteProgress, say
from hybridflow.convert.survey import Survey, kind_of, open_survey
from hybridflow.errors import CheckpointError
from hybridflow.formats.block_fp8 import READ_AS_BFLOAT16
from hybridflow.formats.distributed_storage import Chunk
from hybridflow.formats.safetensors_files import ALL, TensorInfo


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


@dataclass(frozen=True)
class ConversionPlan:
    """What will be written."""

    num_tensors: int  # by their HuggingFace names
    chunks: tuple[Chunk, ...]
    notes: tuple[str, ...]  # what the user should know of it
    config_changes: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


def to_megatron(
    source: Path,
    target: Path,
    *,
    value_head: bool = False,
    lm_head: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    processes: Processes = ALONE,
    console: Console | None = None,
) -> None:
    """Write `target`. lm_head: "keep", "drop", or None for what suits value_head.

    Collective over `processes`. Errors: CheckpointError; `target` is then as it was before.
    """
    check_target(target, source, overwrite=overwrite)
    survey = open_survey(source)
    if kind_of(source) == "megatron":
        raise CheckpointError(f"{source}: is a megatron checkpoint already; megatron-to-hf converts it")
    plan = make_plan(survey, value_head=value_head, lm_head=lm_head)
    notes = list(plan.notes)
    own = own_share(plan.chunks, processes)
    own_bytes = sum(chunk.num_bytes for chunk in own)
    with (
        new_directory(target, num_bytes=plan.num_bytes, processes=processes) as directory,
        ByteProgress("hf-to-megatron", plan.num_bytes, own=own_bytes, console=console) as progress,
    ):
        write_distributed(directory, own, group=processes.group, written=progress.advance)
        if processes.first:
            section = survey.spec.config_section
            notes += write_companions(
                source, directory, plan.config_changes, section=section, trust_remote_code=trust_remote_code
            )
    for note in notes:
        say(console, note)
    say(console, f"{target}: {plan.num_tensors} tensors, {progress.totals()}")


def make_plan(survey: Survey, *, value_head: bool, lm_head: str | None) -> ConversionPlan:
    """Errors: CheckpointError where a tensor would not be read once, or a parameter not be written once."""
    spec, infos = survey.spec, dict(survey.weights)
    files: WeightFiles = survey.files
    head = target_head(spec, value_head=value_head, lm_head=lm_head)
    new_head = value_head and VALUE_HEAD.hf[0] not in survey.files
    survey.check(may_lack=VALUE_HEAD.hf if new_head else ())
    if new_head:
        dtype = infos[embedding(spec).hf[0]].dtype
        files, infos[VALUE_HEAD.hf[0]] = _WithValueHead(files, dtype), TensorInfo((1, spec.embedding_size), dtype)
    if head != "lm":
        infos.pop(LM_HEAD.hf[0], None)
    weights = [weight for weight in model_weights(spec, head or "score") if head or weight is not VALUE_HEAD]
    chunks = make_chunks(weights, spec, files, infos)
    narrow = [READ_AS_BFLOAT16] * spec.block_fp8
    notes = [*narrow, *(f"dropped: {line}" for line in survey.dropped_lines()), *_head_notes(spec, head, new_head)]
    return ConversionPlan(len(infos), tuple(chunks), tuple(notes), config_changes(spec, head))


# -------------------------------------------------------------------------------------------------------- heads


def target_head(spec: ModelSpec, *, value_head: bool, lm_head: str | None) -> Head | None:
    """ "lm", "score", or None where no head is to be written. Errors: CheckpointError for what cannot be."""
    if spec.head == "score":
        if lm_head is not None:
            file = spec.path / "config.json"
            raise CheckpointError(f"{file}: the model has a value head and no language model head to {lm_head}")
        return "score"
    if value_head and lm_head == "keep":
        raise CheckpointError("--value-head puts a value head where the language model head is: it cannot be kept")
    if value_head:
        return "score"
    return None if lm_head == "drop" else "lm"


class _WithValueHead:
    """The files of a model, and beside them a value head of zeros."""

    def __init__(self, files: WeightFiles, dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype

    def read(self, name: str, shape: Shape, rows: slice = ALL) -> Tensor:
        if name == VALUE_HEAD.hf[0]:
            return torch.zeros(shape, dtype=self._dtype)[rows]
        return self._files.read(name, shape, rows)

    def file_of(self, name: str) -> Path:
        return self._files.file_of(name)


# -------------------------------------------------------------------------------------------------------- notes


def _head_notes(spec: ModelSpec, head: Head | None, new_head: bool) -> list[str]:
    notes = []
    if spec.head == "lm" and head != "lm":
        why = f"{embedding(spec).hf[0]}, to which it is tied, stays" if spec.tied else "as asked for"
        notes.append(f"dropped: the language model head, {LM_HEAD.hf[0]}: {why}")
    if new_head:
        notes.append(f"new: a value head, {VALUE_HEAD.hf[0]}, of zeros: all values are 0 at first")
    if head is None:
        notes.append("no head is written: a critic that starts from this checkpoint gets a value head of zeros")
    return notes
