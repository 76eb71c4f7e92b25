"""Whole HuggingFace tensors out of a role's shards, on every rank of its grid."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.architecture.parts import whole_parts
from hybridflow.architecture.weights import model_weights
from hybridflow.models.named_weights import named_weights
from hybridflow.roles.base import Role


def whole(role: Role, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """HuggingFace name -> whole float32 tensor; `of` picks a tensor of a parameter. Empty outside the role's grid.

    One gather of all shards of a stage and one broadcast of each stage: gloo takes as long for a small tensor.
    """
    if not role.grid.inside:
        return {}
    tp, pp = role.grid.groups.tp, role.grid.groups.pp
    own = {w.megatron: p for w, p in named_weights(role.chunks, role.spec, head=role.head)}
    held = [None] * role.grid.pp
    dist.all_gather_object(held, sorted(own), group=pp)
    weights = tuple(model_weights(role.spec, role.head))
    here = [weight for weight in weights if weight.megatron in own]
    layout, mine = role.grid.layout, {}
    for group, among in (("dense", tp), ("experts", role.grid.groups.tp_ep)):
        its = [weight for weight in here if weight.group == group]
        shards = [of(own[weight.megatron]).detach().float().cpu() for weight in its]
        flat = joined(shards)
        everyones = [torch.empty_like(flat) for _ in layout.places(group)]
        dist.all_gather(everyones, flat, group=among)
        cut = zip(*(split(each, [shard.shape for shard in shards]) for each in everyones), strict=True)
        found = zip(its, cut, strict=True)
        mine |= {w.megatron: whole_parts(w, list(each), role.spec, layout.places(group)) for w, each in found}
    owner = {w.megatron: next(stage for stage, names in enumerate(held) if w.megatron in names) for w in weights}
    tensors = {}
    for stage in range(role.grid.pp):
        its = [weight for weight in weights if owner[weight.megatron] == stage]
        shapes = [shape for weight in its for shape in weight.shapes(role.spec)]
        if role.grid.pp_rank == stage:
            flat = joined([part for weight in its for part in mine[weight.megatron]])
        else:
            flat = torch.empty(sum(torch.Size(shape).numel() for shape in shapes))
        dist.broadcast(flat, group=pp, group_src=stage)
        names = [name for weight in its for name in weight.hf]
        tensors |= zip(names, split(flat, shapes), strict=True)
    return {name: tensors[name] for weight in weights for name in weight.hf}


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(x.flatten() for x in tensors)])


def split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse of `joined`; tensors of their own, as who holds one must not hold all."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [x.view(shape).clone() for x, shape in zip(flat.split(sizes), shapes, strict=True)]
