"""Context parallelism: the ranks of a context group share the tokens of each micro-batch.

Rank r of c has the pieces r and 2 c - 1 - r of 2 c nearly equal ones of every stretch of tokens: causal attention then
costs all ranks alike, and so does attention to a shared prompt (Grattafiori et al. 2024, section 3.3.2).

Only token mixers need tokens of other ranks. `MicroBatch.where` lists the outputs that this rank computes. With
`delta_net` a rank has all tokens of some heads. With `window_attention` ranks send each other the tails of pieces.
Other attention (`context_attention`; latent attention by `attention_to_whole`) is merged from several calls of a kernel
by `shared_prompt.MergedCalls`; tensors are as there:

    own        a piece with itself, causal
    before     a piece with all of its stretch before the piece
    prompts    what follows a shared prompt with all of the prompt

Keys and values of all ranks (k_all, v_all) are gathered for the last two. With recomputation, the backward pass keeps
those of one layer at a time. Without it, a layer keeps those of the own tokens, and the backward pass gathers again.
Gradients of keys and values are summed at their owners.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import to_device_async
from hybridflow.models.delta_rule import NO_PARENT, Sequences
from hybridflow.models.shared_prompt import Arrivals, AttentionSpans, MergedCalls, OtherKeys, bounds


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
        longest = max(map(len, self.of_ranks))
        if not longest:
            return own
        padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
        parts = of_all_ranks(padded, self.context).split(longest)
        return torch.cat([part[: len(of_rank)] for part, of_rank in zip(parts, self.of_ranks, strict=True)])

    def own(self, of_all: Tensor) -> Tensor:
        """This rank's of the values that belong to `where`."""
        found: Tensor = of_all.split([*map(len, self.of_ranks)])[self.context.rank]
        return found


@dataclass(frozen=True)
class ContextSpans:
    """What a mixer of the own tokens reads of other ranks.

    num_tokens: of each rank, padding included. reads: of own queries, gathered keys. stretches: of all ranks together,
    and the prompt that each continues. gathered: (T,) int64, where the stretches' tokens are among those of all ranks,
    rank after rank.
    """

    context: Context
    num_tokens: int
    reads: tuple[OtherKeys, ...]
    stretches: Sequences
    gathered: Tensor

    @property
    def here(self) -> slice:
        """Of all ranks' tokens: this rank's."""
        return slice(self.context.rank * self.num_tokens, (self.context.rank + 1) * self.num_tokens)

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
        parents = [NO_PARENT] * len(lengths)
        for prompt, followers in prompts:
            for stretch in followers:
                parents[stretch] = prompt
        reads = tuple(_reads(pairs, device) for pairs in (*before, to_prompts) if pairs)
        stretches = Sequences(tuple(lengths), tuple(parents))
        return cls(context, num_tokens, reads, stretches, to_device_async(gathered, device))


def _reads(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> OtherKeys:
    queries, keys = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    sizes = tuple(map(len, queries)), tuple(map(len, keys))
    spans = AttentionSpans(*sizes, bounds(sizes[0], device), bounds(sizes[1], device), causal=False)
    return OtherKeys(to_device_async(torch.cat(queries), device), to_device_async(torch.cat(keys), device), spans)


Arrival = Callable[[], Tensor]


# ------------------------------------------------------------------------------------------------ between ranks


def begin_gather(own: Tensor, context: Context) -> Arrival:
    """Start an all-gather of (n, ...); the returned function waits for (c n, ...). own: as long on every rank."""
    own = own.detach().contiguous()
    whole = own.new_empty(context.size * len(own), *own.shape[1:])
    work = dist.all_gather_into_tensor(whole, own, group=context.group, async_op=True)

    def arrives() -> Tensor:
        work.wait()
        return whole

    return arrives


def of_all_ranks(own: Tensor, context: Context, arrives: Arrival | None = None) -> Tensor:
    """(n, ...) of each rank -> (c n, ...); gradients are summed at the owners. own: as long on every rank.

    arrives: of a gather of the same that has begun.
    """
    whole: Tensor = OfAllRanks.apply(own, context, arrives)
    return whole


class OfAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, context: Context, arrives: Arrival | None) -> Tensor:
        ctx.context = context
        return (arrives or begin_gather(own, context))()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_at_owners(grad, ctx.context), None, None


def sum_at_owners(of_all: Tensor, context: Context) -> Tensor:
    """Reduce-scatter: (c n, ...) summands of each rank for all tokens -> (n, ...) sums for this rank's tokens."""
    own = of_all.new_empty(len(of_all) // context.size, *of_all.shape[1:])
    dist.reduce_scatter_tensor(own, of_all.contiguous(), group=context.group)
    return own


def exchanged(parts: Tensor, context: Context) -> Tensor:
    """All-to-all with gradients: (c, n, ...), a part for each rank -> (c, n, ...), a part from each rank."""
    found: Tensor = Exchanged.apply(parts, context)
    return found


class Exchanged(torch.autograd.Function):
    """Such an exchange is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, context: Context) -> Tensor:
        ctx.context, sent = context, parts.contiguous()
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=context.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchanged.forward(ctx, grad, ctx.context), None


# ------------------------------------------------------------------------------------------------ attention


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
    """Gathers keys and values of all ranks; see `context_attention`."""

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
