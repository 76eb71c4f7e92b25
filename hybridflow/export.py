"""Write the actor as a HuggingFace directory that transformers and vLLM load.

The ranks of the first replica send their shards of one weight at a time, tensor-parallel ranks to the first of their
pipeline stage, that to the first stage, which writes files of at most `MAX_FILE_BYTES`; it never holds more than one
file's tensors. The directory appears when it is complete.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.models.weights import Weight, model_weights, staged_weights, whole_parts
from hybridflow.roles.policy import Actor
from hybridflow.run_dir import replace_directory

MAX_FILE_BYTES = 5 * 10**9
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
NOT_COPIED = ("config.json", "model.safetensors.index.json")


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
            _write_weights(tensors, _file_plan(actor, max_file_bytes), partial, report)
            _write_configuration(actor, partial)
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


def _file_plan(actor: Actor, max_file_bytes: int) -> dict[str, str]:
    """File of each tensor, known before the first is written: sizes follow from the config."""
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    element_size = next(iter(actor.weights().values()))[1].element_size()
    for weight in model_weights(actor.spec, "lm"):
        for name, shape in zip(weight.hf, weight.shapes(actor.spec), strict=True):
            size = prod(shape) * element_size
            if size > room and groups[-1]:
                groups.append([])
                room = max_file_bytes
            groups[-1].append(name)
            room -= size
    if len(groups) == 1:
        return dict.fromkeys(groups[0], "model.safetensors")
    return {
        name: f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i, group in enumerate(groups, 1) for name in group
    }


def _write_weights(
    tensors: Iterator[tuple[str, Tensor]], plan: dict[str, str], directory: Path, report: Callable[[str], None]
) -> None:
    pending: dict[str, Tensor] = {}
    files = sorted(set(plan.values()))
    total = 0
    for name, tensor in tensors:
        pending[name] = tensor
        if len(pending) == sum(file == plan[name] for file in plan.values()):
            save_file(pending, directory / plan[name], metadata={"format": "pt"})
            total += sum(x.nbytes for x in pending.values())
            pending = {}
            report(f"wrote {plan[name]} ({total / 1e6:.1f} MB so far)")
    assert not pending, f"tensors without a file: {sorted(pending)}"
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": plan}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_configuration(actor: Actor, directory: Path) -> None:
    """config.json with the weights' dtype; tokenizer, chat template and generation config as they were."""
    source = actor.spec.path
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(actor.weights().values()))[1].dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    for file in sorted({file for pattern in COPIED for file in source.glob(pattern)}):
        if file.name not in NOT_COPIED:
            shutil.copyfile(file, directory / file.name)
