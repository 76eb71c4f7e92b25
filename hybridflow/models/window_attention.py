"""Attention that reaches back a window of tokens, the token itself included, over packed sequences.

What follows a shared prompt reaches into the prompt's last tokens. The log-sum-exps of two calls cannot say that: how
far a query reaches into the prompt depends on where the query stands. So each response has copies of those keys and
values, which are no more than the window.

With context parallelism each own piece has copies of the keys and values before it that are in reach. Ranks send each
other the tails of their pieces, which are no more than the window either.

Axes of tensors, as suffixes: t tokens, h heads of keys and values, d the sizes of a key and of a value together.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models.attention import Attend, PackedAttention, PackedSequences, attention_by_length
from hybridflow.models.context import Context, ContextSpans, of_all_ranks, pieces_of
from hybridflow.models.delta_rule import NO_PARENT, Sequences
from hybridflow.models.shared_prompt import (
    attention_of_last,
    attention_with_copies,
    bounds,
    prompts_before,
    varlen_attention,
)


class WindowAttention(PackedAttention):
    """Core attention of a layer with a window, whose rotary embedding may be another than other layers have."""

    def angles(self, packed: PackedSequences) -> tuple[Tensor | None, Tensor | None]:
        if packed.window_cos is None:
            return super().angles(packed)
        return packed.window_cos, packed.window_sin


class UnturnedAttention(PackedAttention):
    """Core attention without rotary embedding (NoPE)."""

    def angles(self, packed: PackedSequences) -> tuple[Tensor | None, Tensor | None]:
        return None, None


def attend_in_window(window: int, *, by_varlen: bool) -> Attend:
    """by_varlen: by torch's variable-length flash attention, on CUDA in 16 bits."""
    return partial(varlen_window_attention if by_varlen else window_attention, window=window)


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float, window: int
) -> Tensor:
    """(tokens, heads, head_dim) from query and grouped key, value, by a mask: any dtype, any device."""
    if packed.shared is not None:
        return attention_with_copies(
            query, key, value, own=packed.own, shared=packed.shared, scale=scale, window=window
        )
    if packed.context is not None:
        keys, values, lengths = with_tails(key, value, packed, packed.context, window)
        qkv_of_pieces = zip(query.split(packed.lengths), keys.split(lengths), values.split(lengths), strict=True)
        return torch.cat([attention_of_last(*tensors, scale=scale, window=window) for tensors in qkv_of_pieces])
    return attention_by_length(query, key, value, packed=packed, scale=scale, window=window)


def varlen_window_attention(
    query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float, window: int
) -> Tensor:
    """The same in one kernel, which sees queries as the last of their keys."""
    spans = packed.own
    if packed.context is not None:
        key, value, lengths = with_tails(key, value, packed, packed.context, window)
        spans = replace(spans, keys=lengths, key_bounds=bounds(lengths, key.device))
    elif packed.shared is not None:
        key, value, lengths = with_copies(key, value, packed, window)
        spans = replace(spans, keys=lengths, key_bounds=bounds(lengths, key.device))
    return varlen_attention(query, key, value, spans, scale, window=window)


def with_copies(
    key: Tensor, value: Tensor, packed: PackedSequences, window: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Keys and values of every sequence, behind those of the shared prompt that are in reach; and how many they are.

    Gradients of a prompt's keys are summed over the responses in float32, in one order.
    """
    assert packed.shared is not None, "no prompt is shared"
    starts = accumulate(packed.lengths, initial=0)
    pieces = {start: number for number, start in enumerate(starts)}
    prompt_numbers = [
        pieces[prompt.start] if prompt.stop > prompt.start else None
        for prompt in prompts_before(packed.own, packed.shared)
    ]

    def copied(x: Tensor) -> list[Tensor]:
        x_of_sequences = x.float().split(packed.lengths)
        prompt_tails = [x[:0] if i is None else _last(x_of_sequences[i], window - 1) for i in prompt_numbers]
        return [torch.cat(pair) for pair in zip(prompt_tails, x_of_sequences, strict=True)]

    keys, values = copied(key), copied(value)
    lengths = tuple(len(piece) for piece in keys)
    return torch.cat(keys).to(key.dtype), torch.cat(values).to(value.dtype), lengths


def _last(x: Tensor, count: int) -> Tensor:
    return x[max(0, len(x) - count) :]


# ------------------------------------------------------------------------------------------------ over ranks


@dataclass(frozen=True)
class Tail:
    """The last tokens of a piece."""

    rank: int
    number: int  # of the piece among the rank's
    count: int


class InReach(NamedTuple):
    """Which tails of pieces ranks send, and which of them stand before each own piece."""

    sent: tuple[tuple[int, ...], ...]  # of each rank, of each of its pieces: how many tokens
    before: tuple[tuple[Tail, ...], ...]


@lru_cache(maxsize=1 << 4)  # every layer of a micro-batch asks for the same
def in_reach(stretches: Sequences, size: int, rank: int, window: int) -> InReach:
    """size: ranks that share the stretches' tokens. A piece reaches back into the prompt that its stretch continues."""
    pieces = [pieces_of(stretches.lengths, Context(size, each, None)) for each in range(size)]
    sent = tuple(tuple(min(piece.length, window - 1) for piece in of_rank) for of_rank in pieces)
    of_stretch: dict[int, list[tuple[int, Tail]]] = {}  # where each piece begins, and its tail
    for each, of_rank in enumerate(pieces):
        for number, piece in enumerate(of_rank):
            tail = Tail(each, number, sent[each][number])
            of_stretch.setdefault(piece.stretch, []).append((piece.first, tail))

    def tails_before(stretch: int, first: int, count: int) -> tuple[Tail, ...]:
        found: list[Tail] = []
        for _, tail in sorted((x for x in of_stretch.get(stretch, []) if x[0] < first), reverse=True):
            if count:
                found.insert(0, replace(tail, count=min(tail.count, count)))
                count -= found[0].count
        parent = stretches.parents[stretch]
        if count and parent != NO_PARENT:
            return (*tails_before(parent, stretches.lengths[parent], count), *found)
        return tuple(found)

    return InReach(sent, tuple(tails_before(piece.stretch, piece.first, window - 1) for piece in pieces[rank]))


def with_tails(
    key: Tensor, value: Tensor, packed: PackedSequences, spans: ContextSpans, window: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Keys and values of every own piece, behind those before it that are in reach; and how many they are.

    Gradients of a token's keys are summed over a rank's pieces in float32, in one order; over ranks in the keys' dtype.
    Collective over the ranks that share tokens.
    """
    reach = in_reach(spans.stretches, spans.context.size, spans.context.rank, window)
    kv_thd = torch.cat([key, value], dim=-1)
    kv_of_pieces = kv_thd.split(packed.lengths)  # the last may be padding, and the only one
    own_tails = torch.cat([kv_thd[:0], *(_last(x, window - 1) for x in kv_of_pieces[: len(reach.before)])])
    longest = max(1, *map(sum, reach.sent))
    padded = torch.cat([own_tails, own_tails.new_zeros(longest - len(own_tails), *own_tails.shape[1:])])
    tails_of_ranks = of_all_ranks(padded, spans.context).split(longest)
    tails = [x.split([*sizes, longest - sum(sizes)]) for x, sizes in zip(tails_of_ranks, reach.sent, strict=True)]
    read = dict.fromkeys((tail.rank, tail.number) for of_piece in reach.before for tail in of_piece)
    tail_float32 = {(rank, number): tails[rank][number].float() for rank, number in read}
    tails_before = [[_last(tail_float32[tail.rank, tail.number], tail.count) for tail in each] for each in reach.before]
    tails_before += [[]] * (len(kv_of_pieces) - len(tails_before))
    kv_in_reach = [torch.cat([*before, kv.float()]) for before, kv in zip(tails_before, kv_of_pieces, strict=True)]
    keys, values = torch.cat(kv_in_reach).to(key.dtype).split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys.contiguous(), values.contiguous(), tuple(map(len, kv_in_reach))
