"""Context parallelism: the ranks of a context group share the tokens of each micro-batch.

Rank r of c has the pieces r and 2 c - 1 - r of 2 c nearly equal ones of every stretch of tokens: causal attention then
costs all ranks alike, and so does attention to a shared prompt (Grattafiori et al. 2024, section 3.3.2). Attention of
the own pieces is merged from several calls of a kernel, by log-sum-exps, as in `shared_prompt`:

    own        a piece with itself, causal
    before     a piece with all of its stretch before the piece
    prompts    what follows a shared prompt with all of the prompt

Keys and values of all ranks are gathered for the last two, in the backward pass once more: what is kept is of the own
tokens. Gradients of keys and values are summed at their owners.

Everything but the attention is of single tokens; which outputs a rank has says `MicroBatch.where`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import to_device_async
from hybridflow.models.shared_prompt import AttentionKernel, AttentionSpans, bounds, merge


@dataclass(frozen=True)
class Context:
    """The group whose ranks share tokens, and this rank's place in it."""

    size: int
    rank: int
    group: dist.ProcessGroup | None  # None: nothing is sent, as in a test of one rank's part


@dataclass(frozen=True)
class TokenPiece:
    """Neighbouring tokens of a stretch."""

    stretch: int
    first: int  # in the stretch
    length: int


def pieces_of(lengths: Sequence[int], context: Context) -> list[TokenPiece]:
    """Those of a rank, stretch after stretch; none of them is empty. lengths: of the stretches."""
    found, parts = [], 2 * context.size
    for stretch, length in enumerate(lengths):
        for number in (context.rank, parts - 1 - context.rank):
            first, end = length * number // parts, length * (number + 1) // parts
            if end > first:
                found.append(TokenPiece(stretch, first, end - first))
    return found


def places(pieces: Sequence[TokenPiece], lengths: Sequence[int]) -> Tensor:
    """(n,) int64: the tokens of the pieces among those of all stretches."""
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    parts = [torch.arange(piece.length) + starts[piece.stretch] + piece.first for piece in pieces]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def most_tokens(lengths: Sequence[int], context: Context) -> int:
    """Of the ranks: they differ by a few."""
    ranks = (Context(context.size, rank, None) for rank in range(context.size))
    return max(sum(piece.length for piece in pieces_of(lengths, each)) for each in ranks)


@dataclass(frozen=True)
class SharedOutputs:
    """The wanted outputs of a micro-batch, which its ranks share: for losses of whole sequences.

    where: (r,) int64 of all ranks' outputs, rank after rank. of_ranks: which of a micro-batch's outputs each rank has.
    """

    context: Context
    where: Tensor
    of_ranks: tuple[Tensor, ...]

    @classmethod
    def of(cls, rows: Tensor, where: Tensor, lengths: Sequence[int], context: Context) -> "SharedOutputs":
        """rows, where: of the micro-batch as a whole; lengths: of its stretches."""
        ranks = [Context(context.size, rank, None) for rank in range(context.size)]
        own = [places(pieces_of(lengths, each), lengths) for each in ranks]
        of_ranks = tuple(torch.isin(rows, each).nonzero().squeeze(1) for each in own)
        return cls(context, where[torch.cat(of_ranks)], of_ranks)

    def gathered(self, own: Tensor) -> Tensor:
        """(r,) values of all ranks' outputs; gradients come back. Collective over the context's ranks."""
        sizes = tuple(map(len, self.of_ranks))
        whole: Tensor = Gathered.apply(own, sizes, self.context) if any(sizes) else own
        return whole

    def own(self, of_all: Tensor) -> Tensor:
        """This rank's of the values that belong to `where`."""
        found: Tensor = of_all.split([*map(len, self.of_ranks)])[self.context.rank]
        return found


@dataclass(frozen=True)
class OtherKeys:
    """Own queries, and gathered keys that they attend to besides their own pieces. Neither has a token twice."""

    queries: Tensor  # (q,) int64: own tokens
    keys: Tensor  # (k,) int64: gathered tokens
    spans: AttentionSpans


@dataclass(frozen=True)
class ContextSpans:
    """What attention of the own pieces reads of other ranks. num_tokens: of each rank, padding included."""

    context: Context
    num_tokens: int
    reads: tuple[OtherKeys, ...]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        prompts: Sequence[tuple[int, Sequence[int]]],
        context: Context,
        num_tokens: int,
        device: torch.device,
    ) -> "ContextSpans":
        """lengths: of the stretches. prompts: stretches that others follow, and those that follow each."""
        gathered = torch.zeros(sum(lengths), dtype=torch.int64)  # of each token, where it is among gathered ones
        for rank in range(context.size):
            own = places(pieces_of(lengths, Context(context.size, rank, None)), lengths)
            gathered[own] = rank * num_tokens + torch.arange(len(own))
        whole = gathered.split(list(lengths))
        pieces = pieces_of(lengths, context)
        ends = list(accumulate(piece.length for piece in pieces))
        tokens = [torch.arange(end - piece.length, end) for end, piece in zip(ends, pieces, strict=True)]

        # first and last pieces apart: the keys before the last ones have those before the first ones in them
        half, before = {}, ([], [])  # type: ignore[var-annotated]
        for piece, own in zip(pieces, tokens, strict=True):
            number = half[piece.stretch] = half.get(piece.stretch, -1) + 1
            if piece.first:
                before[number].append((own, whole[piece.stretch][: piece.first]))
        of_stretch: dict[int, list[Tensor]] = {}
        for piece, own in zip(pieces, tokens, strict=True):
            of_stretch.setdefault(piece.stretch, []).append(own)
        to_prompts = []
        for prompt, followers in prompts:
            queries = [own for stretch in followers for own in of_stretch.get(stretch, [])]
            if queries:
                to_prompts.append((torch.cat(queries), whole[prompt]))
        return cls(context, num_tokens, tuple(_reads(pairs, device) for pairs in (*before, to_prompts) if pairs))


def _reads(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> OtherKeys:
    queries, keys = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    sizes = tuple(map(len, queries)), tuple(map(len, keys))
    spans = AttentionSpans(*sizes, bounds(sizes[0], device), bounds(sizes[1], device), causal=False)
    return OtherKeys(to_device_async(torch.cat(queries), device), to_device_async(torch.cat(keys), device), spans)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    own: AttentionSpans,
    spans: ContextSpans,
    scale: float,
    kernel: AttentionKernel,
) -> Tensor:
    """(tokens, heads, head_dim) of the own tokens. own: every piece with itself. Collective over the group."""
    out: Tensor = ContextAttention.apply(query, key, value, own, spans, scale, kernel)
    return out


class ContextAttention(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: AttentionSpans,
        spans: ContextSpans,
        scale: float,
        kernel: AttentionKernel,
    ) -> Tensor:
        arrives = _gather(key, value, spans)
        out, lse = kernel.forward(query, key, value, own, scale)
        lse = lse.contiguous()
        keys, values = arrives()
        for reads in spans.reads:
            some, some_lse = out[reads.queries], lse[reads.queries]
            more = kernel.forward(query[reads.queries], keys[reads.keys], values[reads.keys], reads.spans, scale)
            merge(some, some_lse, *more)
            out[reads.queries], lse[reads.queries] = some, some_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.own, ctx.spans, ctx.scale, ctx.kernel = own, spans, scale, kernel.backward
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        spans, scale = ctx.spans, ctx.scale
        arrives, grad = _gather(key, value, spans), grad.contiguous()
        dq, dk, dv = ctx.kernel(grad, query, key, value, out, lse, ctx.own, scale)
        keys, values = arrives()
        of_others = [torch.zeros_like(x, dtype=dk.dtype) for x in (keys, values)]
        for reads in spans.reads:
            of_queries = (x[reads.queries] for x in (grad, query))
            of_keys = (x[reads.keys] for x in (keys, values))
            outputs = (x[reads.queries] for x in (out, lse))
            more = ctx.kernel(*of_queries, *of_keys, *outputs, reads.spans, scale)
            for whole, where, part in zip((dq, *of_others), (reads.queries, reads.keys, reads.keys), more, strict=True):
                whole[where] += part  # no token is in `where` twice
        dk, dv = (x + more for x, more in zip((dk, dv), _sum_at_owners(of_others, spans), strict=True))
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None, None


def _gather(key: Tensor, value: Tensor, spans: ContextSpans) -> Any:
    """Begin to gather; what is called for the whole keys and values, (c tokens, heads, head_dim)."""
    widths = [key.shape[-1], value.shape[-1]]
    sent = torch.cat([key, value], dim=-1)
    whole = sent.new_empty(spans.context.size * len(sent), *sent.shape[1:])
    work = dist.all_gather_into_tensor(whole, sent, group=spans.context.group, async_op=True)

    def arrives() -> tuple[Tensor, ...]:
        work.wait()
        found: tuple[Tensor, ...] = whole.split(widths, dim=-1)
        return found

    return arrives


def _sum_at_owners(of_all: Sequence[Tensor], spans: ContextSpans) -> tuple[Tensor, ...]:
    """Of gathered keys and values the gradients that all ranks have found, at the rank whose tokens they are."""
    widths, sent = [x.shape[-1] for x in of_all], torch.cat(list(of_all), dim=-1)
    own = sent.new_empty(spans.num_tokens, *sent.shape[1:])
    dist.reduce_scatter_tensor(own, sent, group=spans.context.group)
    found: tuple[Tensor, ...] = own.split(widths, dim=-1)
    return found


class Gathered(torch.autograd.Function):
    """Values of own outputs -> of all ranks' outputs, (r, ...) each of its own length; gradients are summed back."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: tuple[int, ...], context: Context) -> Tensor:
        ctx.sizes, ctx.context = sizes, context
        longest = max(sizes)
        padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
        whole = padded.new_empty(context.size * longest, *own.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=context.group)
        return torch.cat([part[:size] for part, size in zip(whole.split(longest), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.context.group)
        own: Tensor = grad.split(list(ctx.sizes))[ctx.context.rank]
        return own, None, None
