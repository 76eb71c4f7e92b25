"""Norms and activations for megatron's local layers, where Transformer Engine's fused ones are not to be had.

RMSNorm and SwiGLU are each one autograd function that keeps only the input, of half as many operations as autograd
would record. `layer_classes` may choose other functions of the same gradients. `WideHeadNorm` is an RMSNorm over all
heads, which tensor-parallel ranks share (OLMo 3).
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.distributed import ProcessGroup

Function = type[torch.autograd.Function]


def mark(parameter: nn.Parameter, **marks: bool | int) -> None:
    """Tell megatron of a parameter what it asks it for by attributes."""
    for name, value in marks.items():
        setattr(parameter, name, value)


@runtime_checkable
class KeepsFloat32(Protocol):
    """A module with parameters that are float32 in a model of any dtype."""

    def keep_float32(self) -> None:
        """Cast such parameters back to float32, after a cast of the model."""


class RMSNormFunction(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) and n = x r:  y = w n,  dw = sum(dy n),  dx = r (w dy - n mean(w dy n))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        y: Tensor = (x * r).to(x.dtype).mul_(weight)  # rounded before the weight, as HuggingFace's Llama does
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        n = x * r  # float32
        products = grad * n
        mean = (products @ weight.float()).unsqueeze(-1).div_(x.shape[-1])
        grad_weight = products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_x = torch.mul(grad, weight, out=products) if grad.dtype == torch.float32 else (grad * weight).float()
        return grad_x.addcmul_(n, mean, value=-1).mul_(r).to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019), computed in float32.

    megatron's own wrapper refuses sequence parallelism, which only needs the mark on the weight.
    """

    function: ClassVar[Function] = RMSNormFunction

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function.apply(x, self.weight, self.eps)
        return y


class ZeroCenteredRMSNormFunction(torch.autograd.Function):
    """With r and n as above:  y = (1 + w) n,  dw = sum(dy n),  dx = r ((1 + w) dy - n mean((1 + w) dy n)).

    Rounded once, behind the weight, as HuggingFace's Gemma and Qwen3.5 do.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        y: Tensor = (x * r).mul_(1 + weight.float()).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        n, factor = x * r, 1 + weight.float()  # float32
        products = grad * n
        mean = (products @ factor).unsqueeze(-1).div_(x.shape[-1])
        grad_weight = products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return (grad * factor).addcmul_(n, mean, value=-1).mul_(r).to(x.dtype), grad_weight, None


class ZeroCenteredRMSNorm(RMSNorm):
    """y = (1 + w) x / sqrt(mean(x^2) + eps)."""

    function = ZeroCenteredRMSNormFunction


class OverHeads:
    """Of a norm of each head, whose weight the heads of all tensor-parallel ranks share: gradients are summed here.

    megatron sums them for its own layers alone, and with sequence parallelism for what is marked. `group` is set by who
    builds the norm.
    """

    group: ProcessGroup | None = None

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        y: Tensor = self.function.apply(x, weight, self.eps)
        return y


class HeadNorm(OverHeads, RMSNorm):
    """y = w x / sqrt(mean(x^2) + eps) of each head."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__(config, hidden_size, eps)
        mark(self.weight, sequence_parallel=False)


class ZeroCenteredHeadNorm(HeadNorm):
    """y = (1 + w) x / sqrt(mean(x^2) + eps) of each head."""

    function = ZeroCenteredRMSNormFunction


class LayerNorm(nn.LayerNorm):
    """torch's, with the marks that sequence parallelism needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in (self.weight, self.bias):
            mark(parameter, sequence_parallel=config.sequence_parallel)


class ReLU(nn.ReLU):
    """torch's, made as megatron makes activations."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()


class SwiGLUFunction(torch.autograd.Function):
    """The gradients of gate and up are written where they belong: nothing is concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        return grad_x


class SwiGLU(nn.Module):
    """silu(gate) up (Shazeer 2020) of fc1's output, whose last dimension is [gate; up]."""

    function: ClassVar[Function] = SwiGLUFunction

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function.apply(x)
        return y


class GeGLUFunction(torch.autograd.Function):
    """As `SwiGLUFunction`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
        grad_up = nn.functional.gelu(gate, approximate="tanh").mul_(grad)
        return torch.cat([grad_gate, grad_up], dim=-1)


class GeGLU(nn.Module):
    """gelu(gate) up (Shazeer 2020), with GELU's approximation by tanh, of fc1's output [gate; up]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = GeGLUFunction.apply(x)
        return y


class CompiledSwiGLUFunction(torch.autograd.Function):
    """By megatron's expressions, each of which torch compiles to one kernel: experts have no other fused activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y: Tensor = swiglu(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad_x: Tensor = swiglu_back(grad, x)
        return grad_x


class CompiledSwiGLU(SwiGLU):
    function = CompiledSwiGLUFunction


class WideRMSNormFunction(torch.autograd.Function):
    """As `RMSNormFunction`; means are over the last two dimensions and the ranks of a group.

    x: (t, 1, heads here, head_dim); weight: (heads here, head_dim). Rounded once, behind the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        wide = x.float()
        r = _mean_over_ranks(wide.square(), group).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        ctx.group = group
        return (wide * r * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        n, scaled = x.float() * r, grad.float() * weight
        grad_x = r * (scaled - n * _mean_over_ranks(scaled * n, ctx.group))
        grad_weight = (grad * n).flatten(0, 1).sum(0).to(weight.dtype)
        return grad_x.to(x.dtype), grad_weight, None, None


def _mean_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
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
