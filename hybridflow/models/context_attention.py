"""Attention with context parallelism: own pieces of the stretches, and what they read of other ranks.

It is merged from several calls of a kernel, by `shared_prompt.MergedCalls`:

    own        a piece with itself, causal
    before     a piece with all of its stretch before the piece
    prompts    what follows a shared prompt with all of the prompt

Keys and values of all ranks (k_all, v_all) are gathered for the last two. With recomputation, the backward pass
keeps those of one layer at a time. Without it, a layer keeps those of the own tokens, and the backward pass gathers
again. Gradients of keys and values are summed at their owners. Tensors are as in `shared_prompt`.
"""

from typing import Any

import torch
from torch import Tensor

from hybridflow.models.context import Context, begin_gather, sum_at_owners
from hybridflow.models.shared_prompt import Arrivals, MergedCalls


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, calls: MergedCalls, *, context: Context, keep: bool
) -> Tensor:
    """(tokens, heads, head_dim) of the own tokens. Collective over the group.

    keep: the gathered keys and values for the backward pass.
    """
    out: Tensor = ContextAttention.apply(query, key, value, calls, context, keep)
    return out


def attention_to_whole(query: Tensor, k_all: Tensor, v_all: Tensor, calls: MergedCalls, *, here: slice) -> Tensor:
    """The same of (ranks x tokens, heads, head_dim) keys and values that are here already. Nothing is sent.

    here: the own tokens among all ranks'.
    """
    out: Tensor = AttentionToWhole.apply(query, k_all, v_all, calls, here)
    return out


class ContextAttention(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: MergedCalls, context: Context, keep: bool
    ) -> Tensor:
        out, lse, *kv_all = calls.forward(query, key, value, _gather_both(key, value, context))
        ctx.save_for_backward(*(query, key, value, out, lse), *(kv_all if keep else ()))
        ctx.calls, ctx.context = calls, context
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *kv_all = ctx.saved_tensors
        arrives = (lambda: kv_all) if kv_all else _gather_both(key, value, ctx.context)
        query_side = grad.contiguous(), query, out, lse
        dq, dk, dv = ctx.calls.gradients(query_side, key, value, ctx.calls.own)
        k_all, v_all = arrives()
        dk_all, dv_all = (torch.zeros_like(x, dtype=dq.dtype) for x in (k_all, v_all))
        ctx.calls.add_others((dq, dk_all, dv_all), query_side, k_all, v_all)
        dk, dv = (x + more for x, more in zip((dk, dv), _sum_at_owners(dk_all, dv_all, ctx.context), strict=True))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None


class AttentionToWhole(torch.autograd.Function):
    """The caller passes the gathered keys and values, and keeps them or computes them again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, k_all: Tensor, v_all: Tensor, calls: MergedCalls, here: slice) -> Tensor:
        key, value = (x[here].contiguous() for x in (k_all, v_all))
        out, lse, *_ = calls.forward(query, key, value, lambda: (k_all, v_all))
        ctx.save_for_backward(query, k_all, v_all, out, lse)
        ctx.calls, ctx.here = calls, here
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, k_all, v_all, out, lse = ctx.saved_tensors
        key, value = (x[ctx.here].contiguous() for x in (k_all, v_all))
        query_side = grad.contiguous(), query, out, lse
        dq, dk, dv = ctx.calls.gradients(query_side, key, value, ctx.calls.own)
        dk_all, dv_all = (torch.zeros_like(x, dtype=dq.dtype) for x in (k_all, v_all))
        ctx.calls.add_others((dq, dk_all, dv_all), query_side, k_all, v_all)
        dk_all[ctx.here] += dk
        dv_all[ctx.here] += dv
        return dq.to(query.dtype), dk_all.to(k_all.dtype), dv_all.to(v_all.dtype), None, None


def _gather_both(key: Tensor, value: Tensor, context: Context) -> Arrivals:
    """Begin to gather; what is called for the keys and values of all, (ranks x tokens, heads, head_dim)."""
    arrives = begin_gather(torch.cat([key, value], dim=-1), context)
    return lambda: arrives().split([key.shape[-1], value.shape[-1]], dim=-1)


def _sum_at_owners(dk_all: Tensor, dv_all: Tensor, context: Context) -> tuple[Tensor, ...]:
    """Of gathered keys and values the gradients that all ranks have found, at the rank whose tokens they are."""
    own = sum_at_owners(torch.cat([dk_all, dv_all], dim=-1), context)
    found: tuple[Tensor, ...] = own.split([dk_all.shape[-1], dv_all.shape[-1]], dim=-1)
    return found
