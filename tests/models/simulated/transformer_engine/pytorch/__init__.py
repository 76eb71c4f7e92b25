"""Layers by their names. In tensor parallelism they hold their shards, and compute alone."""

import torch
from torch import Tensor, nn

from transformer_engine.pytorch import distributed, fp8, ops

__all__ = ["distributed", "fp8", "ops"]


class RMSNorm(nn.Module):
    """Of that size: megatron-core 0.19.2 calls it normalized_shape, 0.16.1 hidden_size."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        *,
        hidden_size: int | None = None,
        eps: float,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        zero_centered_gamma: bool,
        **rest: object,
    ) -> None:
        super().__init__()
        assert (normalized_shape is None) != (hidden_size is None)
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(normalized_shape or hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class _Fused(torch.autograd.Function):
    """The weight's gradient is added to `main_grad`, or written over it where the micro-batch is said to be the first.

    What autograd gets in place of it is anything, here NaN. As in linear.py of Transformer Engine 2.16.1.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, first: bool | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.first = weight, first
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        beta = 0 if ctx.first else 1
        weight.main_grad.addmm_(grad.flatten(0, -2).t().float(), x.flatten(0, -2).float(), beta=beta)
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan), None


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        tp_size: int,
        params_dtype: torch.dtype,
        fuse_wgrad_accumulation: bool,
        **rest: object,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        rows, columns = (tp_size, 1) if parallel_mode == "column" else (1, tp_size)
        self.in_features, self.out_features = in_features // columns, out_features // rows
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=params_dtype))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled() and self.weight.requires_grad
        y = _Fused.apply(x, self.weight, is_first_microbatch) if fused else nn.functional.linear(x, self.weight)
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        params_dtype: torch.dtype,
        zero_centered_gamma: bool,
        **rest: object,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **rest)
        self.eps, self.offset = eps, float(zero_centered_gamma)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=params_dtype))

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        bias = getattr(self, "layer_norm_bias", None)
        if bias is None:
            normed = nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight + self.offset, self.eps)
        else:
            normed = nn.functional.layer_norm(x, x.shape[-1:], self.layer_norm_weight, bias, self.eps)
        return super().forward(normed, is_first_microbatch)


class DotProductAttention(nn.Module):
    """The spec names it; attention is ours."""


class GroupedLinear(nn.Module):
    """The spec of experts names it; experts are ours."""
