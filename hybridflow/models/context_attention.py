"""Attention with context parallelism: own pieces of the stretches, and what they read of other ranks.

It is merged from several calls of a kernel, by log-sum-exps, as in `shared_prompt`:

    own        a piece with itself, causal
    before     a piece with all of its stretch before the piece
    prompts    what follows a shared prompt with all of the prompt

Keys and values of all ranks are gathered for the last two. They are kept where the layer is computed again: then they
are there for one layer at a time. Else the backward pass gathers once more, and what is kept is of the own tokens.
Gradients of keys and values are summed at their owners.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.models.context import ContextSpans, begin_gather, sum_at_owners
from hybridflow.models.shared_prompt import AttentionKernel, AttentionSpans, merge

Arrivals = Callable[[], Sequence[Tensor]]  # keys and values of all ranks


@dataclass(frozen=True)
class ContextCalls:
    """Those of a kernel: every piece with itself, `own`, and what `spans` reads of other ranks."""

    own: AttentionSpans
    spans: ContextSpans
    scale: float
    kernel: AttentionKernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor, arrives: Arrivals) -> tuple[Tensor, ...]:
        """Output and log-sum-exps; the keys and values of all ranks, which arrive while own pieces attend."""
        out, lse = self.kernel.forward(query, key, value, self.own, self.scale)
        lse = lse.contiguous()
        keys, values = arrives()
        for reads in self.spans.reads:
            some, some_lse = out[reads.queries], lse[reads.queries]
            of_keys = keys[reads.keys], values[reads.keys]
            merge(some, some_lse, *self.kernel.forward(query[reads.queries], *of_keys, reads.spans, self.scale))
            out[reads.queries], lse[reads.queries] = some, some_lse
        return out, lse, keys, values

    def gradients(self, dq: Tensor, of_own: Sequence[Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of all keys and values from this rank's reads; what queries get is added to dq.

        of_own: gradient, query, out and lse.
        """
        of_others = torch.zeros_like(keys, dtype=dq.dtype), torch.zeros_like(values, dtype=dq.dtype)
        for reads in self.spans.reads:
            grad, query, out, lse = (x[reads.queries] for x in of_own)
            of_keys = keys[reads.keys], values[reads.keys]
            more = self.kernel.backward(grad, query, *of_keys, out, lse, reads.spans, self.scale)
            for whole, where, part in zip((dq, *of_others), (reads.queries, reads.keys, reads.keys), more, strict=True):
                whole[where] += part  # no token is in `where` twice
        return of_others


def context_attention(query: Tensor, key: Tensor, value: Tensor, calls: ContextCalls, *, keep: bool) -> Tensor:
    """(tokens, heads, head_dim) of the own tokens. Collective over the group.

    keep: the gathered keys and values for the backward pass.
    """
    out: Tensor = ContextAttention.apply(query, key, value, calls, keep)
    return out


def attention_to_whole(query: Tensor, keys: Tensor, values: Tensor, calls: ContextCalls) -> Tensor:
    """The same of (c tokens, heads, head_dim) keys and values that are here already. Nothing is sent."""
    out: Tensor = AttentionToWhole.apply(query, keys, values, calls)
    return out


class ContextAttention(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: ContextCalls, keep: bool) -> Tensor:
        out, lse, *whole = calls.forward(query, key, value, _gather_both(key, value, calls.spans))
        ctx.save_for_backward(*(query, key, value, out, lse), *(whole if keep else ()))
        ctx.calls = calls
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *kept = ctx.saved_tensors
        calls: ContextCalls = ctx.calls
        arrives = (lambda: kept) if kept else _gather_both(key, value, calls.spans)
        grad = grad.contiguous()
        dq, dk, dv = calls.kernel.backward(grad, query, key, value, out, lse, calls.own, calls.scale)
        of_others = calls.gradients(dq, (grad, query, out, lse), *arrives())
        dk, dv = (x + more for x, more in zip((dk, dv), _sum_at_owners(of_others, calls.spans), strict=True))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


class AttentionToWhole(torch.autograd.Function):
    """Where the whole keys and values are inputs, which whoever has made them keeps or makes again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, calls: ContextCalls) -> Tensor:
        key, value = (x[calls.spans.here].contiguous() for x in (keys, values))
        out, lse, *_ = calls.forward(query, key, value, lambda: (keys, values))
        ctx.save_for_backward(query, keys, values, out, lse)
        ctx.calls = calls
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, out, lse = ctx.saved_tensors
        calls: ContextCalls = ctx.calls
        key, value = (x[calls.spans.here].contiguous() for x in (keys, values))
        grad = grad.contiguous()
        dq, dk, dv = calls.kernel.backward(grad, query, key, value, out, lse, calls.own, calls.scale)
        of_keys, of_values = calls.gradients(dq, (grad, query, out, lse), keys, values)
        of_keys[calls.spans.here] += dk
        of_values[calls.spans.here] += dv
        return dq.to(query.dtype), of_keys.to(keys.dtype), of_values.to(values.dtype), None


def _gather_both(key: Tensor, value: Tensor, spans: ContextSpans) -> Arrivals:
    """Begin to gather; what is called for the whole keys and values, (c tokens, heads, head_dim)."""
    arrives = begin_gather(torch.cat([key, value], dim=-1), spans.context)
    return lambda: arrives().split([key.shape[-1], value.shape[-1]], dim=-1)


def _sum_at_owners(of_all: Sequence[Tensor], spans: ContextSpans) -> tuple[Tensor, ...]:
    """Of gathered keys and values the gradients that all ranks have found, at the rank whose tokens they are."""
    own = sum_at_owners(torch.cat(list(of_all), dim=-1), spans.context)
    found: tuple[Tensor, ...] = own.split([x.shape[-1] for x in of_all], dim=-1)
    return found
