"""A torch_dist checkpoint, or an adapter and its base model, become a directory that transformers and vLLM load.

Whatever layout wrote the checkpoint, and whatever lies in it beside the weights: optimizer state is left where it is.
Each tensor is read when it is written; no more than one is in memory.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from torch import Tensor

from hybridflow.architecture.adapter import is_adapter
from hybridflow.architecture.overrides import position_fields
from hybridflow.architecture.spec import Head, ModelSpec, config_changes
from hybridflow.architecture.weights import model_weights
from hybridflow.convert.adapted import open_adapted
from hybridflow.convert.compare import read_cast
from hybridflow.convert.output import check_target, new_directory, write_companions
from hybridflow.convert.processes import ALONE, Processes
from hybridflow.convert.progress import ByteProgress, say
from hybridflow.convert.survey import kind_of, open_survey
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import is_distributed
from hybridflow.formats.huggingface_files import (
    copy_companions,
    files_of_plan,
    num_bytes,
    plan_files,
    write_index,
    write_safetensors,
)
from hybridflow.formats.safetensors_files import TensorInfo

MAX_SHARD_BYTES = 5 * 10**9
FLOAT32 = torch.float32


class Reader(Protocol):
    """Reads a tensor by its name, in the dtype that `infos` says."""

    def __call__(self, name: str, *, infos: Mapping[str, TensorInfo]) -> Tensor: ...


@dataclass(frozen=True)
class SourceModel:
    """What is written. infos: of every tensor."""

    spec: ModelSpec
    head: Head
    infos: dict[str, TensorInfo]
    read: Reader
    directories: tuple[Path, ...]  # with config.json and the tokenizer; of the later ones the tokenizer counts more
    notes: tuple[str, ...] = ()


def to_huggingface(
    source: Path,
    target: Path,
    *,
    base: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    processes: Processes = ALONE,
    console: Console | None = None,
) -> None:
    """Write `target`, with tensors in `dtype` if given, but for what `in_dtype` keeps.

    base: of an adapter, in place of the base model that the adapter names. Collective over `processes`. Errors:
    CheckpointError, ConfigError; `target` is then as it was before.
    """
    check_target(target, source, overwrite=overwrite)
    model = _adapted(source, base, target) if is_adapter(source) else _of_megatron(source, base)
    infos = model.infos if dtype is None else in_dtype(model, dtype)
    plan = plan_files(infos, max_shard_bytes)
    assert plan.keys() == infos.keys(), f"tensors without a file: {sorted(infos.keys() ^ plan.keys())}"
    own = own_files(plan, infos, processes)
    own_bytes = sum(num_bytes(infos[name]) for name, file in plan.items() if file in own)
    total = sum(map(num_bytes, infos.values()))
    notes, what = list(model.notes), "megatron-to-hf" if is_distributed(source) else "peft-to-hf"
    with (
        new_directory(target, num_bytes=total, processes=processes) as directory,
        ByteProgress(what, total, own=own_bytes, console=console) as progress,
    ):
        files = files_of_plan(plan, infos)
        for file in own:
            read = partial(model.read, infos=files[file])
            write_safetensors(directory / file, files[file], read, written=progress.advance)
        if processes.first:
            write_index(directory, plan, total)
            changes = config_changes(model.spec, model.head)
            first, *others = model.directories
            notes += write_companions(
                first,
                directory,
                changes,
                section=model.spec.config_section,
                dtype=main_dtype(infos),
                trust_remote_code=trust_remote_code,
            )
            for other in others:
                copy_companions(other, directory)
    for note in notes:
        say(console, note)
    plural = "s" if len(files) > 1 else ""
    say(console, f"{target}: {len(infos)} tensors in {len(files)} file{plural}, {progress.totals()}")


def _of_megatron(source: Path, base: str | None) -> SourceModel:
    survey = open_survey(source)
    if kind_of(source) == "HuggingFace":
        raise CheckpointError(f"{source}: is a HuggingFace directory already; hf-to-megatron converts it")
    if base is not None:
        raise CheckpointError(f"--base {base}: {source} is a whole model, and not an adapter of a base model")
    survey.check()
    read = partial(read_cast, survey.files)
    return SourceModel(survey.spec, survey.spec.head, survey.weights, read, (source,))


def _adapted(source: Path, base: str | None, target: Path) -> SourceModel:
    found = open_adapted(source, base)
    check_target(target, found.spec.path, overwrite=True)
    spec = found.spec.base
    if is_distributed(source):  # the run's config.json, whose positions may be other ones
        spec = replace(spec, overriding=position_fields(source))
    return SourceModel(
        spec=spec,
        head=found.head,
        infos=dict(found.infos),
        read=found.read,
        directories=(found.spec.path, source),
        notes=found.notes,
    )


def in_dtype(model: SourceModel, dtype: torch.dtype) -> dict[str, TensorInfo]:
    """Tensors in `dtype`; in float32 what the trainer has so, and what the source has so beside narrower weights."""
    wide = {name for weight in model_weights(model.spec, model.head) if weight.float32 for name in weight.hf}
    beside = main_dtype(model.infos) != FLOAT32

    def new(name: str, found: torch.dtype) -> torch.dtype:
        return FLOAT32 if (name in wide and found != dtype) or (beside and found == FLOAT32) else dtype

    return {name: TensorInfo(info.shape, new(name, info.dtype)) for name, info in model.infos.items()}


def own_files(plan: Mapping[str, str], infos: Mapping[str, TensorInfo], processes: Processes) -> list[str]:
    """This process's files, in order: from the largest on, each goes to the process with the fewest bytes."""
    sizes = Counter[str]()
    for name, file in plan.items():
        sizes[file] += num_bytes(infos[name])
    loads = [0] * processes.count
    own = []
    for file, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        rank = loads.index(min(loads))
        loads[rank] += size
        if rank == processes.rank:
            own.append(file)
    return sorted(own)


def main_dtype(infos: Mapping[str, TensorInfo]) -> torch.dtype:
    """That of most bytes: config.json names one."""
    sizes = Counter[torch.dtype]()
    for info in infos.values():
        sizes[info.dtype] += num_bytes(info)
    return sizes.most_common(1)[0][0]
