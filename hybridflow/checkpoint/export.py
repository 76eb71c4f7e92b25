"""Write the actor as a HuggingFace directory that transformers and vLLM load.

The ranks of the first replica send their shards of one weight at a time, tensor-parallel ranks to the first of their
pipeline stage, that to the first stage, which writes it to files of at most `MAX_FILE_BYTES`; it never holds more than
one weight. The directory appears when it is complete.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.parts import whole_parts
from hybridflow.architecture.weights import Weight, model_weights, staged_weights
from hybridflow.formats.directories import replace_directory
from hybridflow.formats.huggingface_files import (
    copy_companions,
    num_bytes,
    plan_files,
    write_config,
    write_index,
    write_safetensors,
)
from hybridflow.formats.safetensors_files import TensorInfo
from hybridflow.roles.policy import Actor

MAX_FILE_BYTES = 5 * 10**9


def export_huggingface(
    actor: Actor,
    target: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Collective over the world. The weights are those the actor holds now, in its dtype."""
    grid = actor.grid
    if grid.inside and grid.dp_rank == 0:
        tensors = _whole_tensors(actor)
        if grid.tp_rank == grid.pp_rank == 0:
            partial = target.with_name(f".{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _write_weights(tensors, actor, partial, max_file_bytes, report)
            write_config(actor.spec.path, partial, {}, dtype=_dtype(actor))
            copy_companions(actor.spec.path, partial)
            replace_directory(partial, target)
        else:
            for _ in tensors:  # take part in every gather
                continue
    dist.barrier(group=dist.group.WORLD)


def _whole_tensors(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """(HuggingFace name, tensor on the CPU) on the first rank of the replica; the others only send."""
    own, grid = actor.weights(), actor.grid
    for weight, stage in staged_weights(actor.spec, "lm", grid.layout.stages(actor.spec.num_layers)):
        parts = None
        if grid.pp_rank == stage:
            shards = _gather(own[weight.megatron][1].contiguous(), actor)
            parts = [part.contiguous() for part in whole_parts(weight, shards, actor.spec)] if shards else None
        if stage != 0 and grid.tp_rank == 0:
            parts = _to_first_stage(weight, parts, stage, actor)
        if parts is not None and grid.pp_rank == 0:
            for name, part, shape in zip(weight.hf, parts, weight.shapes(actor.spec), strict=True):
                assert tuple(part.shape) == shape, f"{name}: {tuple(part.shape)}, expected {shape}"
                yield name, part.cpu()


def _to_first_stage(weight: Weight, parts: list[Tensor] | None, stage: int, actor: Actor) -> list[Tensor] | None:
    """The parts of a later stage's weight, on the first stage."""
    grid, like = actor.grid, next(iter(actor.weights().values()))[1]
    if grid.pp_rank == stage:
        for part in parts:
            dist.send(part, group=grid.groups.pp, group_dst=0)
    elif grid.pp_rank == 0:
        parts = [like.new_empty(shape) for shape in weight.shapes(actor.spec)]
        for part in parts:
            dist.recv(part, group=grid.groups.pp, group_src=stage)
    return parts


def _gather(shard: Tensor, actor: Actor) -> list[Tensor]:
    """The shards of the tensor-parallel group, on its first rank; empty elsewhere."""
    group = actor.grid.groups.tp
    shards = [torch.empty_like(shard) for _ in range(actor.grid.tp)] if actor.grid.tp_rank == 0 else None
    dist.gather(shard, shards, group=group, group_dst=0)
    return shards or []


def _dtype(actor: Actor) -> torch.dtype:
    return next(iter(actor.weights().values()))[1].dtype


def _write_weights(
    arriving: Iterator[tuple[str, Tensor]],
    actor: Actor,
    directory: Path,
    max_file_bytes: int,
    report: Callable[[str], None],
) -> None:
    """Tensors arrive in the order of the plan, which is known before the first: sizes follow from the config."""
    tensors = {
        name: TensorInfo(shape, _dtype(actor))
        for weight in model_weights(actor.spec, "lm")
        for name, shape in zip(weight.hf, weight.shapes(actor.spec), strict=True)
    }

    def arrived(name: str) -> Tensor:
        found, tensor = next(arriving)
        assert found == name, f"{found} arrived, {name} was planned"
        return tensor

    plan, total = plan_files(tensors, max_file_bytes), 0
    for file in dict.fromkeys(plan.values()):
        inside = {name: tensors[name] for name in plan if plan[name] == file}
        write_safetensors(directory / file, inside, arrived)
        total += sum(map(num_bytes, inside.values()))
        report(f"wrote {file} ({total / 1e6:.1f} MB so far)")
    assert next(arriving, None) is None, "tensors without a file"
    write_index(directory, plan, total)
