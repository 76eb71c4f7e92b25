"""Attention with context parallelism: own pieces of the stretches, and what they read of other ranks.

It is merged from several calls of a kernel, by `shared_prompt.MergedCalls`:

    own        a piece with itself, causal
    before     a piece with all of its stretch before the piece
    prompts    what follows a shared prompt with all of the prompt

Keys and values of all ranks are gathered for the last two. They are kept where the layer is computed again: then they
are there for one layer at a time. Else the backward pass gathers once more, and what is kept is of the own tokens.
Gradients of keys and values are summed at their owners. Tensors are as in `shared_prompt`.
"""

from collections.abc import Sequence
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


def attention_to_whole(query: Tensor, keys: Tensor, values: Tensor, calls: MergedCalls, *, here: slice) -> Tensor:
    """The same of (c tokens, heads, head_dim) keys and values that are here already. Nothing is sent.

    here: the own tokens among all ranks'.
    """
    out: Tensor = AttentionToWhole.apply(query, keys, values, calls, here)
    return out


class ContextAttention(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: MergedCalls, context: Context, keep: bool
    ) -> Tensor:
        out, lse, *whole = calls.forward(query, key, value, _gather_both(key, value, context))
        ctx.save_for_backward(*(query, key, value, out, lse), *(whole if keep else ()))
        ctx.calls, ctx.context = calls, context
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *kept = ctx.saved_tensors
        arrives = (lambda: kept) if kept else _gather_both(key, value, ctx.context)
        of_queries = grad.contiguous(), query, out, lse
        dq, dk, dv = ctx.calls.gradients(of_queries, key, value, ctx.calls.own)
        keys, values = arrives()
        of_others = torch.zeros_like(keys, dtype=dq.dtype), torch.zeros_like(values, dtype=dq.dtype)
        ctx.calls.add_others((dq, *of_others), of_queries, keys, values)
        dk, dv = (x + more for x, more in zip((dk, dv), _sum_at_owners(of_others, ctx.context), strict=True))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None


class AttentionToWhole(torch.autograd.Function):
    """Where the whole keys and values are inputs, which whoever has made them keeps or makes again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, calls: MergedCalls, here: slice) -> Tensor:
        key, value = (x[here].contiguous() for x in (keys, values))
        out, lse, *_ = calls.forward(query, key, value, lambda: (keys, values))
        ctx.save_for_backward(query, keys, values, out, lse)
        ctx.calls, ctx.here = calls, here
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, out, lse = ctx.saved_tensors
        key, value = (x[ctx.here].contiguous() for x in (keys, values))
        of_queries = grad.contiguous(), query, out, lse
        dq, dk, dv = ctx.calls.gradients(of_queries, key, value, ctx.calls.own)
        of_keys, of_values = (torch.zeros_like(x, dtype=dq.dtype) for x in (keys, values))
        ctx.calls.add_others((dq, of_keys, of_values), of_queries, keys, values)
        of_keys[ctx.here] += dk
        of_values[ctx.here] += dv
        return dq.to(query.dtype), of_keys.to(keys.dtype), of_values.to(values.dtype), None, None


def _gather_both(key: Tensor, value: Tensor, context: Context) -> Arrivals:
    """Begin to gather; what is called for the whole keys and values, (c tokens, heads, head_dim)."""
    arrives = begin_gather(torch.cat([key, value], dim=-1), context)
    return lambda: arrives().split([key.shape[-1], value.shape[-1]], dim=-1)


def _sum_at_owners(of_all: Sequence[Tensor], context: Context) -> tuple[Tensor, ...]:
    """Of gathered keys and values the gradients that all ranks have found, at the rank whose tokens they are."""
    own = sum_at_owners(torch.cat(list(of_all), dim=-1), context)
    found: tuple[Tensor, ...] = own.split([x.shape[-1] for x in of_all], dim=-1)
    return found
