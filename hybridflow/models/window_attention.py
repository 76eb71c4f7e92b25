"""Attention that reaches back a window of tokens, the token itself included, over packed sequences.

What follows a shared prompt reaches into the prompt's last tokens. The log-sum-exps of two calls cannot say that: how
far a query reaches into the prompt depends on where the query stands. So each response has copies of those keys and
values, which are no more than the window.

With context parallelism each own piece has copies of the keys and values before it that are in reach. Ranks send each
other the ends of their pieces, which are no more than the window either.
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
        keys, values, lengths = with_ends(key, value, packed, packed.context, window)
        heads = zip(query.split(packed.lengths), keys.split(lengths), values.split(lengths), strict=True)
        return torch.cat([attention_of_last(*tensors, scale=scale, window=window) for tensors in heads])
    return attention_by_length(query, key, value, packed=packed, scale=scale, window=window)


def varlen_window_attention(
    query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float, window: int
) -> Tensor:
    """The same in one kernel, which sees queries as the last of their keys."""
    spans = packed.own
    if packed.context is not None:
        key, value, lengths = with_ends(key, value, packed, packed.context, window)
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
    before = [
        pieces[prompt.start] if prompt.stop > prompt.start else None
        for prompt in prompts_before(packed.own, packed.shared)
    ]

    def copied(x: Tensor) -> list[Tensor]:
        stretches = x.float().split(packed.lengths)
        reached = [x[:0] if prompt is None else _last(stretches[prompt], window - 1) for prompt in before]
        return [torch.cat(pair) for pair in zip(reached, stretches, strict=True)]

    keys, values = copied(key), copied(value)
    lengths = tuple(len(piece) for piece in keys)
    return torch.cat(keys).to(key.dtype), torch.cat(values).to(value.dtype), lengths


def _last(x: Tensor, count: int) -> Tensor:
    return x[max(0, len(x) - count) :]


# ------------------------------------------------------------------------------------------------ over ranks


@dataclass(frozen=True)
class End:
    """The last tokens of a piece."""

    rank: int
    number: int  # of the piece among the rank's
    count: int


class InReach(NamedTuple):
    """Which ends of pieces ranks send, and which of them stand before each own piece."""

    sent: tuple[tuple[int, ...], ...]  # of each rank, of each of its pieces: how many tokens
    before: tuple[tuple[End, ...], ...]


@lru_cache(maxsize=1 << 4)  # every layer of a micro-batch asks for the same
def in_reach(stretches: Sequences, size: int, rank: int, window: int) -> InReach:
    """size: ranks that share the stretches' tokens. A piece reaches back into the prompt that its stretch continues."""
    pieces = [pieces_of(stretches.lengths, Context(size, each, None)) for each in range(size)]
    sent = tuple(tuple(min(piece.length, window - 1) for piece in of_rank) for of_rank in pieces)
    of_stretch: dict[int, list[tuple[int, End]]] = {}  # where each piece begins, and its end
    for each, of_rank in enumerate(pieces):
        for number, piece in enumerate(of_rank):
            end = End(each, number, sent[each][number])
            of_stretch.setdefault(piece.stretch, []).append((piece.first, end))

    def ends_before(stretch: int, first: int, count: int) -> tuple[End, ...]:
        found: list[End] = []
        for _, end in sorted((x for x in of_stretch.get(stretch, []) if x[0] < first), reverse=True):
            if count:
                found.insert(0, replace(end, count=min(end.count, count)))
                count -= found[0].count
        parent = stretches.parents[stretch]
        if count and parent != NO_PARENT:
            return (*ends_before(parent, stretches.lengths[parent], count), *found)
        return tuple(found)

    return InReach(sent, tuple(ends_before(piece.stretch, piece.first, window - 1) for piece in pieces[rank]))


def with_ends(
    key: Tensor, value: Tensor, packed: PackedSequences, spans: ContextSpans, window: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Keys and values of every own piece, behind those before it that are in reach; and how many they are.

    Gradients of a token's keys are summed over a rank's pieces in float32, in one order; over ranks in the keys' dtype.
    Collective over the ranks that share tokens.
    """
    reach = in_reach(spans.stretches, spans.context.size, spans.context.rank, window)
    both = torch.cat([key, value], dim=-1)
    own = both.split(packed.lengths)  # padding is the last, if there is any
    ends = torch.cat([both[:0], *(_last(x, window - 1) for x in own[: len(reach.before)])])  # of no piece, maybe
    longest = max(1, *map(sum, reach.sent))
    padded = torch.cat([ends, ends.new_zeros(longest - len(ends), *ends.shape[1:])])
    of_ranks = of_all_ranks(padded, spans.context).split(longest)
    parts = [x.split([*sizes, longest - sum(sizes)]) for x, sizes in zip(of_ranks, reach.sent, strict=True)]
    read = dict.fromkeys((end.rank, end.number) for of_piece in reach.before for end in of_piece)
    wide = {(rank, number): parts[rank][number].float() for rank, number in read}
    before = [[_last(wide[end.rank, end.number], end.count) for end in of_piece] for of_piece in reach.before]
    before += [[]] * (len(own) - len(before))
    found = [torch.cat([*ends, piece.float()]) for ends, piece in zip(before, own, strict=True)]
    keys, values = torch.cat(found).to(key.dtype).split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys.contiguous(), values.contiguous(), tuple(map(len, found))
