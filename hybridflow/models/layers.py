"""Norms and activations for megatron's local layers, where Transformer Engine's fused ones are not to be had.

RMSNorm and SwiGLU are each one autograd function that keeps only its input. On a CPU, where passes over memory take as
long as matrix products, they are kernels of ours in C (`cpu/kernels/layers.py`); else torch's operations, half as
many as autograd would record.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from hybridflow.cpu.kernels import layers as native
from hybridflow.cpu.kernels.threads import takes


def mark(parameter: nn.Parameter, **marks: bool | int) -> None:
    """Tell megatron of a parameter what it asks it for by attributes."""
    for name, value in marks.items():
        setattr(parameter, name, value)


class RMSNorm(nn.Module):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019), computed in float32.

    megatron's own wrapper refuses sequence parallelism, which only needs the mark on the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = RMSNormFunction.apply(x, self.weight, self.eps)
        return y


class RMSNormFunction(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) and n = x r:  y = w n,  dw = sum(dy n),  dx = r (w dy - n mean(w dy n))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if takes(x, weight):
            out, r = native.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, r.view(*x.shape[:-1], 1))
            return out
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        y: Tensor = (x * r).to(x.dtype).mul_(weight)  # rounded before the weight, as HuggingFace's Llama does
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        if takes(x, weight, grad):
            return *native.rms_norm_backward(grad, x, weight, r.view(-1, 1)), None
        n = x * r  # float32
        products = grad * n
        mean = (products @ weight.float()).unsqueeze(-1).div_(x.shape[-1])
        grad_weight = products.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_x = torch.mul(grad, weight, out=products) if grad.dtype == torch.float32 else (grad * weight).float()
        return grad_x.addcmul_(n, mean, value=-1).mul_(r).to(x.dtype), grad_weight, None


class SumAndNormFunction(torch.autograd.Function):
    """(s, y): s = x + residual, y = RMSNorm(s), in one pass; the gradients of both are one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, r = native.sum_and_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, r)
        return total, y

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight, r = ctx.saved_tensors
        grad_x, grad_weight = native.rms_norm_backward(grad, total, weight, r, beside=grad_total)
        return grad_x, grad_x, grad_weight, None


class SummingLayer(TransformerLayer):
    """megatron's layer; on a CPU the sum after attention and the norm of it are one kernel, where it has RMSNorms."""

    _normed: Tensor | None = None  # of the sum that attention ends with, until the MLP takes it

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        again = self.recompute_pre_mlp_layernorm or config.recompute_granularity == "full"  # there memory counts more
        if not (again or self.hidden_dropout):
            self._their_sum, self.self_attn_bda = self.self_attn_bda, lambda *given: partial(self._sum, given)

    def _sum(
        self, given: tuple[Any, ...], attended: tuple[Tensor, Tensor | None], residual: Tensor, p: float
    ) -> Tensor:
        (x, bias), norm = attended, self.pre_mlp_layernorm
        if bias is not None or not takes(x, residual, norm.weight):
            theirs: Tensor = self._their_sum(*given)(attended, residual, p)
            return theirs
        total: Tensor
        total, self._normed = SumAndNormFunction.apply(x, residual, norm.weight, norm.eps)
        return total

    def _forward_pre_mlp_layernorm(self, hidden_states: Tensor) -> Tensor:
        normed, self._normed = self._normed, None
        if normed is None:
            normed = super()._forward_pre_mlp_layernorm(hidden_states)
        return normed


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


class SwiGLU(nn.Module):
    """silu(gate) up (Shazeer 2020) of fc1's output, whose last dimension is [gate; up]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = SwiGLUFunction.apply(x)
        return y


class SwiGLUFunction(torch.autograd.Function):
    """The gradients of gate and up are written where they belong: nothing is concatenated.

    By the kernels in C over gate and up themselves where these are nobody's but the graph's; autograd is told, and
    refuses a second backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.is_result = not x.is_leaf
        if takes(x):
            return native.swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if takes(x, grad):
            if ctx.is_result:
                torch.autograd.graph.increment_version(x)
            return native.swiglu_backward(grad, x, over=ctx.is_result)
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up)
        grad_up.mul_(grad)
        return grad_x
