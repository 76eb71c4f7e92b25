"""RMSNorm, SwiGLU and a layer's attention on a CPU, where passes over memory take as long as matrix products.

Each function is one pass, by the kernels in C. `models.layer_classes` opens this door where there are such kernels.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.cpu.kernels import layers as kernels


class RMSNormFunctionInC(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) and n = x r:  y = w n,  dw = sum(dy n),  dx = r (w dy - n mean(w dy n))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        return *kernels.rms_norm_backward(grad, x, weight, r), None


class SumAndNormFunction(torch.autograd.Function):
    """(s, y): s = x + residual, y = RMSNorm(s), in one pass; the gradients of both are one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, r = kernels.sum_and_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, r)
        return total, y

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        total, weight, r = ctx.saved_tensors
        grad_x, grad_weight = kernels.rms_norm_backward(grad, total, weight, r, beside=grad_total)
        return grad_x, grad_x, grad_weight, None


class SwiGLUFunctionInC(torch.autograd.Function):
    """silu(gate) up of [gate; up].

    The gradients are written over gate and up where these are nobody's but the graph's. autograd knows, and refuses a
    second backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.is_result = not x.is_leaf
        return kernels.swiglu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if ctx.is_result:
            torch.autograd.graph.increment_version(x)
        return kernels.swiglu_backward(grad, x, over=ctx.is_result)


class SummingLayer(TransformerLayer):
    """megatron's layer of RMSNorms; the sum after attention and the norm of it are one kernel."""

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
        if bias is not None:
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


if TYPE_CHECKING:
    _Attention = SelfAttention
else:
    _Attention = object


class TurningHeads(_Attention):
    """Beside a self-attention: it turns queries and keys where the projection has written them.

    Where a norm comes between, or tensor-parallel ranks share the key/value groups, core attention turns them later.
    """

    _rotary: tuple[Tensor, Tensor] | None = None  # of the call that goes on: cosines and sines, not applied yet

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs["packed_seq_params"]
        if packed.cos is not None and self._turns():
            self._rotary = packed.cos, not_none(packed.sin)
            kwargs["packed_seq_params"] = replace(packed, cos=None, sin=None)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self._rotary = None

    def _turns(self) -> bool:
        return (
            not self.config.rotary_interleaved
            and self.pg_collection.tp.size() <= not_none(self.config.num_query_groups)
            and self.q_layernorm is self.k_layernorm is None
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if self._rotary is None:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, *args, **kwargs)
        mixed = SelfAttention.get_query_key_value_tensors(self, hidden_states, key_value_states, split_qkv=False)[0]
        by_group = mixed.squeeze(1).unflatten(-1, (-1, self.hidden_size_per_attention_head))
        query, key, value = (x.unsqueeze(1) for x in TurnedHeads.apply(by_group, *self._rotary))
        return query, key, value


class TurnedHeads(torch.autograd.Function):
    """Queries, keys and values of a projection; the first two are turned in the projection's memory.

    mixed: (t, groups, queries of a group + 2, head_dim), of each group the queries, the key and the value; dense, and
    read by nobody else. Attention then keeps this memory alone for the backward pass, but for queries of several
    groups, which are put side by side; the gradient is written in one pass. (t, heads, head_dim) each.
    """

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.shape = mixed.shape
        turning = mixed[:, :, :-1]
        kernels.rotate(turning, cos, sin, out=turning)
        return mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad = query.new_empty(ctx.shape)
        kernels.rotate(query.reshape(grad[:, :, :-2].shape), cos, -sin, out=grad[:, :, :-2])
        kernels.rotate(key.unsqueeze(2), cos, -sin, out=grad[:, :, -2:-1])
        grad[:, :, -1] = value
        return grad, None, None
