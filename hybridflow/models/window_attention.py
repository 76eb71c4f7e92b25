"""Attention that reaches back a window of tokens, the token itself included, over packed sequences.

What follows a shared prompt reaches into the prompt's last tokens. The log-sum-exps of two calls cannot say that: how
far a query reaches into the prompt depends on where the query stands. So each response has copies of those keys and
values, which are no more than the window.
"""

from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.models.attention import Attend, PackedAttention, PackedSequences
from hybridflow.models.shared_prompt import attention_with_copies, bounds, prompts_before


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
    sizes = [count * length for count, length in packed.runs()]
    outputs = []
    for (count, length), *tensors in zip(
        packed.runs(), query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in tensors)
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def varlen_window_attention(
    query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float, window: int
) -> Tensor:
    """The same in one kernel, which sees queries as the last of their keys."""
    from torch.nn.attention.varlen import varlen_attn

    key_bounds, longest = packed.cu_seqlens_kv, packed.max_seqlen_kv
    if packed.shared is not None:
        key, value, lengths = with_copies(key, value, packed, window)
        key_bounds, longest = bounds(lengths, key.device), max(lengths)
    out = varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        key_bounds,
        packed.max_seqlen_q,
        longest,
        window_size=(window - 1, 0),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
    return out


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
