"""RMSNorm over all heads of queries, or of keys, which tensor-parallel ranks share, as in OLMo 3."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridflow.models.layers import OverHeads, mark


class WideRMSNormFunction(torch.autograd.Function):
    """As `layers.RMSNormFunction`; means are over the last two dimensions and the ranks of a group.

    x: (t, 1, heads here, head_dim); weight: (heads here, head_dim). Rounded once, behind the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        wide = x.float()
        r = _mean(wide.square(), group).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.group = group
        return (wide * r * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        n, scaled = x.float() * r, grad.float() * weight
        grad_x = r * (scaled - n * _mean(scaled * n, ctx.group))
        grad_weight = (grad * n).flatten(0, 1).sum(0).to(weight.dtype)
        return grad_x.to(x.dtype), grad_weight, None, None


def _mean(x: Tensor, group: ProcessGroup) -> Tensor:
    """(t, 1, 1, 1) over all heads of all ranks."""
    total = x.mean((-2, -1), keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.div_(group.size())


class WideHeadNorm(OverHeads, nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over all heads; each rank has the weights of its own heads."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, heads: int, **kwargs: object
    ) -> None:
        """hidden_size: of a head. heads: of all ranks."""
        super().__init__()
        self.eps, self.head_dim = eps, hidden_size
        here = heads // config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(here * hidden_size, dtype=config.params_dtype))
        mark(self.weight, tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1, self.head_dim)
        y: Tensor = WideRMSNormFunction.apply(x, weight, self.eps, not_none(self.group))
        return y
