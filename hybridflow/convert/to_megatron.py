"""A HuggingFace directory becomes a torch_dist checkpoint of megatron-core, which loads on any layout.

Each weight is read block by block, at the moment when the block is written: no more than one is in memory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hybridflow.architecture.spec import Head, ModelSpec, config_changes
from hybridflow.architecture.tables import LM_HEAD, VALUE_HEAD
from hybridflow.architecture.weight import Shape
from hybridflow.architecture.weight_files import write_distributed
from hybridflow.architecture.weights import embedding, model_weights
from hybridflow.convert.chunks import WeightFiles, make_chunks, own_share
from hybridflow.convert.output import check_target, new_directory, write_companions
from hybridflow.convert.processes import ALONE, Processes
from hybridflow.convert.progress import ByteProgress, say
from hybridflow.convert.survey import Survey, kind_of, open_survey
from hybridflow.errors import CheckpointError
from hybridflow.formats.block_fp8 import READ_AS_BFLOAT16
from hybridflow.formats.distributed_storage import Chunk
from hybridflow.formats.safetensors_files import ALL, TensorInfo


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
