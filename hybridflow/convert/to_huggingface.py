"""A torch_dist checkpoint becomes a HuggingFace directory that transformers and vLLM load.

Whatever layout wrote the checkpoint, and whatever lies in it beside the weights: optimizer state is left where it is.
Each tensor is read when it is written; no more than one is in memory.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from hybridflow.architecture.spec import config_changes
from hybridflow.convert.compare import CheckpointFiles, row_pieces
from hybridflow.convert.output import check_target, new_directory, write_companions
from hybridflow.convert.processes import ALONE, Processes
from hybridflow.convert.progress import ByteProgress, say
from hybridflow.convert.survey import kind_of, open_survey
from hybridflow.errors import CheckpointError
from hybridflow.formats.huggingface_files import (
    files_of_plan,
    num_bytes,
    plan_files,
    write_index,
    write_safetensors,
)
from hybridflow.formats.safetensors_files import TensorInfo

MAX_SHARD_BYTES = 5 * 10**9


def to_huggingface(
    source: Path,
    target: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    processes: Processes = ALONE,
    console: Console | None = None,
) -> None:
    """Write `target`, with tensors in `dtype` if given.

    Collective over `processes`. Errors: CheckpointError; `target` is then as it was before.
    """
    check_target(target, source, overwrite=overwrite)
    survey = open_survey(source)
    if kind_of(source) == "HuggingFace":
        raise CheckpointError(f"{source}: is a HuggingFace directory already; hf-to-megatron converts it")
    survey.check()
    infos = {name: TensorInfo(info.shape, dtype or info.dtype) for name, info in survey.weights.items()}
    plan = plan_files(infos, max_shard_bytes)
    assert plan.keys() == infos.keys(), f"tensors without a file: {sorted(infos.keys() ^ plan.keys())}"
    own = own_files(plan, infos, processes)
    own_bytes = sum(num_bytes(infos[name]) for name, file in plan.items() if file in own)
    total = sum(map(num_bytes, infos.values()))
    notes: list[str] = []
    with (
        new_directory(target, num_bytes=total, processes=processes) as directory,
        ByteProgress("megatron-to-hf", total, own=own_bytes, console=console) as progress,
    ):
        files = files_of_plan(plan, infos)
        for file in own:
            read = partial(read_cast, survey.files, infos=files[file])
            write_safetensors(directory / file, files[file], read, written=progress.advance)
        if processes.first:
            write_index(directory, plan, total)
            main = main_dtype(infos)
            changes = config_changes(survey.spec, survey.spec.head)
            notes = write_companions(source, directory, changes, dtype=main, trust_remote_code=trust_remote_code)
    for note in notes:
        say(console, note)
    plural = "s" if len(files) > 1 else ""
    say(console, f"{target}: {len(infos)} tensors in {len(files)} file{plural}, {progress.totals()}")


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


def read_cast(files: CheckpointFiles, name: str, *, infos: Mapping[str, TensorInfo]) -> Tensor:
    """A tensor, in the dtype that `infos` says. Errors: CheckpointError where a number is too large for it."""
    shape, dtype = infos[name]
    if dtype == files.tensors[name].dtype:
        return files.read(name, shape)
    cast = torch.empty(shape, dtype=dtype)
    for rows in row_pieces(files.tensors[name]):  # the whole tensor is held once, in the new dtype
        piece = files.read(name, shape, rows)
        cast[rows] = piece
        if num_infinite(cast[rows]) != num_infinite(piece):
            largest = float(piece[piece.isfinite()].abs().max())
            raise CheckpointError(
                f"{files.file_of(name)}: {name} holds {largest:g}, too large for {dtype}, whose largest number is "
                f"{torch.finfo(dtype).max:g}"
            )
    return cast


def num_infinite(tensor: Tensor) -> int:
    return int(torch.isinf(tensor).sum())


def main_dtype(infos: Mapping[str, TensorInfo]) -> torch.dtype:
    """That of most bytes: config.json names one."""
    sizes = Counter[torch.dtype]()
    for info in infos.values():
        sizes[info.dtype] += num_bytes(info)
    return sizes.most_common(1)[0][0]
