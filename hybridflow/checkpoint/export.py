"""Write a trained model as a HuggingFace directory that transformers and vLLM load.

The ranks of the first replica, and of replicas that share experts with the first, send one weight's shards at a time.
The first rank of each pipeline stage receives the shards and sends the weight to the first stage. The first stage holds
one weight at most, and writes files of at most `MAX_FILE_BYTES`. The directory appears when all files are complete.

Of a model with adapters two directories are written: the model with the adapters merged once, in float32, and the
adapters as PEFT has them.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.merge import merged
from hybridflow.architecture.parts import whole_parts
from hybridflow.architecture.peft_directory import left_out_by_peft, write_adapter
from hybridflow.architecture.spec import Head, ModelSpec, config_changes
from hybridflow.architecture.weights import model_weights, staged_weights
from hybridflow.data.rendering import write_record
from hybridflow.data.tokenizers import keep_tokenizer_class
from hybridflow.errors import CheckpointError, SaveError
from hybridflow.formats.directories import replace_directory
from hybridflow.formats.huggingface_files import (
    add_end_tokens,
    copy_companions,
    files_of_plan,
    num_bytes,
    plan_files,
    write_config,
    write_index,
    write_safetensors,
)
from hybridflow.formats.safetensors_files import TensorInfo
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.agreement import failures
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import Group
from hybridflow.roles.base import TrainedRole

MAX_FILE_BYTES = 5 * 10**9


def export_huggingface(
    role: TrainedRole,
    target: Path,
    *,
    end_token_ids: Sequence[int] = (),
    group: dist.ProcessGroup | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    adapter: Path | None = None,
    base_digest: str | None = None,
    rendering: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Write the weights that the model holds now, in the model's dtype and with the head.

    Collective over the group, by default that of the world.

    end_token_ids: at which the model stops; generation_config.json gets those that it lacks.
    adapter: where the adapters of a model that has any go. base_digest: of the weights that lie under these, as hex.
    rendering: how the run rendered rows, for the runs that begin with the model.

    A model that started without a score head becomes a *ForSequenceClassification with one label. Errors: SaveError,
    on every rank, where a file cannot be written.
    """
    grid, spec, head = role.grid, role.spec, role.head
    failure: str | None = None
    if grid.inside and grid.copy_index("experts") == 0:
        own = {name: tensor for name, (_, tensor) in role.weights().items()}
        dtype = next(iter(own.values())).dtype
        tensors = _whole_tensors(own, dtype, spec, grid, head=head)
        adapters: dict[str, Tensor] = {}
        if spec.lora is not None:
            tensors = merged(tensors, spec, head, adapters)
        if grid.is_first:
            partial = target.with_name(f".{target.name}.partial")
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                _write_weights(tensors, _plan(spec.base, dtype, head), partial, max_file_bytes, report)
                write_config(spec.path, partial, config_changes(spec, head), section=spec.config_section, dtype=dtype)
                copy_companions(spec.path, partial)
                keep_tokenizer_class(spec.path, partial)
                add_end_tokens(partial, end_token_ids)
                write_record(partial, rendering or {})
                replace_directory(partial, target)
                if spec.lora is not None and adapter is not None:
                    write_adapter(adapter, adapters, spec, head, base_digest)
                    write_record(adapter, rendering or {})
                    if (line := left_out_by_peft(spec, head)) is not None:
                        report(f"{adapter}: {line}")
            except CheckpointError as error:
                failure = str(error)
            except OSError as error:
                failure = f"{error.filename or partial}: cannot be written: {error.strerror or error}"
        for _ in tensors:  # take part in every gather, also where nothing can be written any more
            continue
    found = failures(failure, platforms.world_group() if group is None else group)
    if found:
        raise SaveError(f"the trained model cannot be written to {target}: {'; '.join(found)}")


def _whole_tensors(
    own: Mapping[str, Tensor], dtype: torch.dtype, spec: ModelSpec, grid: Grid, *, head: Head
) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, tensor on the CPU) on the first rank of the replica; the others only send.

    own: this rank's weights by megatron name.
    """
    device, is_first = next(iter(own.values())).device, grid.tp_rank == grid.copy_index("dense") == 0
    for weight, stage in staged_weights(spec, head, grid.layout.stages(spec.num_layers)):
        shapes, parts = weight.shapes(spec), []
        if weight.group == "dense" and grid.copy_index("dense") > 0:
            continue
        if grid.pp_rank == stage:
            shards = _gather(own[weight.megatron].contiguous(), grid, weight.group)
            places = grid.layout.places(weight.group)
            parts = [part.contiguous() for part in whole_parts(weight, shards, spec, places)] if shards else []
        elif grid.is_first:
            own_dtype = torch.float32 if weight.float32 else dtype
            parts = [torch.empty(shape, dtype=own_dtype, device=device) for shape in shapes]
        if stage != 0 and is_first:
            _to_first_stage(parts, stage, grid)
        if grid.is_first:
            for name, part, shape in zip(weight.hf, parts, shapes, strict=True):
                assert tuple(part.shape) == shape, f"{name}: {tuple(part.shape)}, expected {shape}"
                yield name, part.cpu()


def _to_first_stage(parts: Sequence[Tensor], stage: int, grid: Grid) -> None:
    """Move the parts of a later stage's weight into those of the first stage."""
    if grid.pp_rank == stage:
        for part in parts:
            dist.send(part, group=grid.groups.pp, group_dst=0)
    elif grid.pp_rank == 0:
        for part in parts:
            dist.recv(part, group=grid.groups.pp, group_src=stage)


def _gather(shard: Tensor, grid: Grid, of: Group) -> list[Tensor]:
    """The shards of one copy of a weight, on the first rank that has one; empty elsewhere."""
    is_first = grid.layout.place_index(of, grid.own_coordinates) == 0
    shards = [torch.empty_like(shard) for _ in grid.layout.places(of)] if is_first else None
    dist.gather(shard, shards, group=grid.groups.tp if of == "dense" else grid.groups.tp_ep, group_dst=0)
    return shards or []


def _plan(spec: ModelSpec, dtype: torch.dtype, head: Head) -> dict[str, TensorInfo]:
    """Every tensor in the order in which they arrive, known before the first: sizes follow from the config."""
    return {
        name: TensorInfo(shape, torch.float32 if weight.float32 else dtype)
        for weight in model_weights(spec, head)
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    }


def _write_weights(
    arriving: Iterator[tuple[str, Tensor]],
    tensors: Mapping[str, TensorInfo],
    directory: Path,
    max_file_bytes: int,
    report: Callable[[str], None],
) -> None:
    def arrived(name: str) -> Tensor:
        found, tensor = next(arriving)
        assert found == name, f"{found} arrived, {name} was planned"
        return tensor

    plan, total = plan_files(tensors, max_file_bytes), 0
    for file, inside in files_of_plan(plan, tensors).items():
        write_safetensors(directory / file, inside, arrived)
        total += sum(map(num_bytes, inside.values()))
        report(f"wrote {file} ({total / 1e6:.1f} MB so far)")
    left = next(arriving, None)
    assert left is None, f"{left[0]} has no file"
    write_index(directory, plan, total)
