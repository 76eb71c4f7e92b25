"""Attention where a prompt that several responses share is in the batch once.

Every stretch of tokens, a prompt or what follows one, attends causally to itself; what follows a prompt also attends to
all of the prompt. The second needs a second call of the same kernel. Calls are merged by their log-sum-exps, also those
of `context`:

    out = (exp(l_1) out_1 + exp(l_2) out_2) / (exp(l_1) + exp(l_2)),    l = log(exp(l_1) + exp(l_2))

The backward pass of flash attention (Dao et al. 2022, algorithm 4) makes the probabilities anew as exp(scores - l) and
takes sum(dout out) of each query: given the merged out and l, each call finds the exact gradients of one part.

Tensors are (tokens, heads, head_dim), log-sum-exps (tokens, heads). Keys and values may have fewer heads than queries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.batch import to_device_async


@dataclass(frozen=True)
class AttentionSpans:
    """Stretches of queries, each of which attends to the stretch of keys of the same number."""

    queries: tuple[int, ...]  # their lengths
    keys: tuple[int, ...]
    query_bounds: Tensor  # (stretches + 1,) int32: where they begin and end
    key_bounds: Tensor
    causal: bool

    def runs(self) -> list[tuple[int, int, int]]:
        """(count, queries, keys) of neighbouring stretches of equal lengths."""
        pairs = zip(self.queries, self.keys, strict=True)
        return [(len(list(run)), queries, keys) for (queries, keys), run in groupby(pairs)]


@dataclass(frozen=True)
class SharedPrompts:
    """Which tokens of a micro-batch are prompts of several responses, and which follow them."""

    prompts: slice  # of tokens: one prompt after another
    responses: slice  # what follows the first prompt, then what follows the second
    lengths: tuple[tuple[int, tuple[int, ...]], ...]  # of each prompt, and of all that follow it
    spans: AttentionSpans  # from responses to prompts

    @classmethod
    def from_lengths(cls, lengths: Sequence[tuple[int, tuple[int, ...]]], *, start: int, device: torch.device) -> Self:
        """`start`: the first token of the first prompt. The responses begin where the last prompt ends."""
        keys = tuple(prompt for prompt, _ in lengths)
        queries = tuple(sum(responses) for _, responses in lengths)
        middle = start + sum(keys)
        spans = AttentionSpans(queries, keys, bounds(queries, device), bounds(keys, device), causal=False)
        return cls(slice(start, middle), slice(middle, middle + sum(queries)), tuple(lengths), spans)


def bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(lengths + 1,) int32: where each of them begins, and the end of the last."""
    return to_device_async(torch.tensor((0, *lengths)).cumsum(0).int(), device)


Forward = Callable[[Tensor, Tensor, Tensor, AttentionSpans, float], tuple[Tensor, Tensor]]  # out and log-sum-exp
Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key, value
Backward = Callable[..., Gradients]


class AttentionKernel(NamedTuple):
    """Attention that returns the log-sum-exp, and the gradients from an output and a log-sum-exp."""

    forward: Forward
    backward: Backward


class OtherKeys(NamedTuple):
    """Queries, and keys that they attend to besides their own stretches. Neither has a token twice."""

    queries: Tensor | slice  # of tokens
    keys: Tensor | slice
    spans: AttentionSpans


Arrivals = Callable[[], Sequence[Tensor]]  # the keys and values that `OtherKeys` number


@dataclass(frozen=True)
class MergedCalls:
    """Calls of a kernel: one of every stretch with itself, causal, and one for each of `others`."""

    own: AttentionSpans
    others: tuple[OtherKeys, ...]
    scale: float
    kernel: AttentionKernel

    def forward(self, query: Tensor, key: Tensor, value: Tensor, arrives: Arrivals) -> tuple[Tensor, ...]:
        """Output and log-sum-exps; and the other keys and values, which arrive while stretches attend to themselves."""
        out, lse = self.kernel.forward(query, key, value, self.own, self.scale)
        keys, values = arrives()
        for at, read, spans in self.others:
            out_at, lse_at = out[at], lse[at]
            merge(out_at, lse_at, *self.kernel.forward(query[at], keys[read], values[read], spans, self.scale))
            if isinstance(at, Tensor):  # else they are views
                out[at], lse[at] = out_at, lse_at
        return out, lse, keys, values

    def gradients(self, query_side: Sequence[Tensor], key: Tensor, value: Tensor, spans: AttentionSpans) -> Gradients:
        """Of query, key and value by one of the calls. query_side: gradient, query, out and lse."""
        grad, query, out, lse = query_side
        return self.kernel.backward(grad, query, key, value, out, lse, spans, self.scale)

    def add_others(self, grads: Gradients, query_side: Sequence[Tensor], keys: Tensor, values: Tensor) -> None:
        """Add the gradients of the calls of `others` to `grads`: those of queries, keys and values."""
        for at, read, spans in self.others:
            grads_of_call = self.gradients([x[at] for x in query_side], keys[read], values[read], spans)
            for total, where, grad in zip(grads, (at, read, read), grads_of_call, strict=True):
                total[where] += grad


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    own: AttentionSpans,
    shared: SharedPrompts | None,
    scale: float,
    kernel: AttentionKernel,
) -> Tensor:
    """(tokens, heads, head_dim). own: every stretch with itself, causal."""
    others = () if shared is None else (OtherKeys(shared.responses, shared.prompts, shared.spans),)
    out: Tensor = Merged.apply(query, key, value, MergedCalls(own, others, scale, kernel))
    return out


class Merged(torch.autograd.Function):
    """`MergedCalls` whose other keys are among the own ones."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: MergedCalls) -> Tensor:
        out, lse, *_ = calls.forward(query, key, value, lambda: (key, value))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls = calls
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        query_side = grad.contiguous(), query, out, lse
        grads = dq, dk, dv = ctx.calls.gradients(query_side, key, value, ctx.calls.own)
        ctx.calls.add_others(grads, query_side, key, value)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Attention to other keys, too, in place: (t, heads, head_dim) and (t, heads)."""
    weight_of_other = torch.sigmoid(other_lse - lse).unsqueeze(-1)  # exp(l_2) / (exp(l_1) + exp(l_2))
    out.copy_(torch.lerp(out.to(lse.dtype), other.to(lse.dtype), weight_of_other))
    lse.copy_(torch.logaddexp(lse, other_lse))


# ------------------------------------------------------------------------------------------------ on CUDA


def varlen(
    query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans, scale: float, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """torch's variable-length flash attention, in 16 bits: the output, and what `options` ask for besides."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        query,
        key,
        value,
        spans.query_bounds,
        spans.key_bounds,
        max(spans.queries),
        max(spans.keys),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        **options,
    )


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans, scale: float
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest

    options = {"window_size": (-1, 0 if spans.causal else -1), "return_aux": AuxRequest(lse=True)}
    out, lse = varlen(query, key, value, spans, scale, **options)
    assert lse.shape == (query.shape[1], len(query)), f"log-sum-exp {tuple(lse.shape)} of {tuple(query.shape)}"
    return out, lse.transpose(0, 1)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans, scale: float, *, window: int | None = None
) -> Tensor:
    """Causal attention alone, with autograd's gradients. Queries are the last of their keys; window: as below."""
    out = varlen(query, key, value, spans, scale, window_size=(-1 if window is None else window - 1, 0))
    assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
    return out


def varlen_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: AttentionSpans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What autograd would call, with an output and log-sum-exp of our own."""
    import torch.nn.attention.varlen  # registers the operator

    found: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        grad,
        query,
        key,
        value,
        out,
        lse.transpose(0, 1).contiguous(),
        spans.query_bounds,
        spans.key_bounds,
        max(spans.queries),
        max(spans.keys),
        spans.causal,
        torch.zeros(2, dtype=torch.uint64, device=grad.device),  # the state of dropout, of which there is none
        scale,
        [-1, 0] if spans.causal else [-1, -1],
    )
    return found


VARLEN = AttentionKernel(varlen_forward, varlen_backward)


# ------------------------------------------------------------------------------------------------ in any dtype


def attention_with_copies(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    own: AttentionSpans,
    shared: SharedPrompts,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The same stretch by stretch, each response with a copy of the prompt's keys and values: any dtype.

    window: how many keys a query reaches, its own included; None: all before it.
    """
    before = dict(zip(_starts(own.queries), prompts_before(own, shared), strict=True))
    outputs = []
    for (start, prompt), length in zip(before.items(), own.queries, strict=True):
        stretch = slice(start, start + length)
        k, v = (torch.cat([x[prompt], x[stretch]]) for x in (key, value))
        outputs.append(attention_of_last(query[stretch], k, v, scale=scale, window=window))
    return torch.cat(outputs)


def attention_of_last(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None) -> Tensor:
    """(tokens, heads, head_dim) where the queries are the last of the keys; window: as above."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    mask = causal_mask(q, k, window)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    found: Tensor = out[0].transpose(0, 1)
    return found


def causal_mask(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """(queries, keys) of (..., tokens, head_dim): which keys a query, one of the last of them, attends to."""
    queries, keys = query.shape[-2], key.shape[-2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries + 1 - window)


def prompts_before(own: AttentionSpans, shared: SharedPrompts) -> Iterator[slice]:
    """The tokens that each stretch of `own` attends to besides itself."""
    starts = [shared.prompts.start + start for start in _starts([prompt for prompt, _ in shared.lengths])]
    followed = chain.from_iterable(
        [slice(start, start + prompt)] * len(responses)
        for start, (prompt, responses) in zip(starts, shared.lengths, strict=True)
    )
    for start in _starts(own.queries):
        inside = shared.responses.start <= start < shared.responses.stop
        yield next(followed) if inside else slice(0, 0)


def _starts(lengths: Sequence[int]) -> list[int]:
    return torch.tensor((0, *lengths)).cumsum(0)[:-1].tolist()
