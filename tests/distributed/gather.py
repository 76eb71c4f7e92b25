"""Whole HuggingFace tensors out of a role's shards, on every rank of its grid."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.architecture.parts import whole_parts
from hybridflow.architecture.weights import model_weights
from hybridflow.models.build import named_weights
from hybridflow.roles.base import Role


def whole(role: Role, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """HuggingFace name -> whole float32 tensor; `of` picks a tensor of a parameter. Empty outside the role's grid."""
    if not role.grid.inside:
        return {}
    own = {w.megatron: p for w, p in named_weights(role.chunks, role.spec, head=role.head)}
    held = [None] * role.grid.pp
    dist.all_gather_object(held, sorted(own), group=role.grid.groups.pp)
    tensors = {}
    for weight in model_weights(role.spec, role.head):
        owner = next(stage for stage, names in enumerate(held) if weight.megatron in names)
        parts = [torch.empty(shape) for shape in weight.shapes(role.spec)]
        if weight.megatron in own:
            shard = of(own[weight.megatron]).detach().float().contiguous()
            shards = [torch.empty_like(shard) for _ in range(role.grid.tp)]
            dist.all_gather(shards, shard, group=role.grid.groups.tp)
            parts = [part.contiguous() for part in whole_parts(weight, shards, role.spec)]
        for name, part in zip(weight.hf, parts, strict=True):
            dist.broadcast(part, group=role.grid.groups.pp, group_src=owner)
            tensors[name] = part.clone()
    return tensors
