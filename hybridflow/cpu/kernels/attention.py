"""Causal attention over packed sequences on a CPU, forward and backward: `attention.c`, called.

Flash attention (Dao et al. 2022) with all scores of 32 queries at once. What follows a prompt that several responses
share attends to the prompt and to itself in one softmax. bfloat16 is read and written, sums are float32. A head of a
sequence is computed by one thread, so that results do not depend on how many there are.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run
from hybridflow.cpu.kernels.matrix import has_units

Stretch = tuple[int, int]  # first token, length
# tokens of a stretch, in the mean of an item, from which on matrix units multiply faster (tests.bench.kernels)
WORTH_UNITS = {torch.float32: 96, torch.bfloat16: 24}


class Arguments(ctypes.Structure):
    """`Attention` of attention.c."""

    _fields_ = fields(
        [
            *("query", "key", "value", "out", "grad", "query_grad", "key_grad", "value_grad"),
            *("lse", "stretches", "items", "next"),
        ],
        [
            *("num_items", "heads", "kv_heads", "dims"),
            *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
            *("bfloat16", "backward", "units"),
        ],
        "scale",
    )


@dataclass(frozen=True)
class Items:
    """What can be computed by itself: sequences, and prompts with all that follow them."""

    stretches: Tensor  # (stretches, 3) int64: first token, length, place of the first key among the item's keys
    items: Tensor  # (items, 4) int64: first stretch, how many, whether the others follow the first, all their tokens

    @classmethod
    def from_stretches(cls, alone: Iterable[Stretch], groups: Iterable[Sequence[Stretch]] = ()) -> "Items":
        """alone: attends to itself. groups: a prompt, then what follows it, which attends to the prompt as well."""
        stretches: list[tuple[int, int, int]] = []
        items: list[tuple[int, int, int, int]] = []
        for group in (*([stretch] for stretch in alone), *groups):
            items.append((len(stretches), len(group), int(len(group) > 1), sum(length for _, length in group)))
            place = 0
            for start, length in group:
                stretches.append((start, length, place))
                place += length
        return cls(torch.tensor(stretches, dtype=torch.int64), torch.tensor(items, dtype=torch.int64))


def attend(query: Tensor, key: Tensor, value: Tensor, items: Items, *, scale: float) -> Tensor:
    """(tokens, heads, head_dim) from query and grouped key, value (tokens, kv_heads, head_dim).

    For what `takes` says yes to. Every token must lie in exactly one stretch of `items`.
    """
    out: Tensor = NativeAttention.apply(query, key, value, items, scale)
    return out


class NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, items: Items, scale: float) -> Tensor:
        sizes = {x.shape[-1] for x in (query, key, value)}
        assert len(sizes) == 1, f"heads of the sizes {sizes}: the kernel reads all of them as of one"
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        _run(query, key, value, items, scale, out=out, lse=lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.items, ctx.scale = items, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = [x.new_empty(x.shape) for x in (query, key, value)]
        _run(query, key, value, ctx.items, ctx.scale, out=out, lse=lse, grads=(grad.contiguous(), *grads))
        return *grads, None, None


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    items: Items,
    scale: float,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor] = (),
) -> None:
    """Forward, into `out` and `lse`; or backward from them and the first of `grads` into the others."""
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    given: Sequence[Tensor | None] = grads or [None] * 4
    pointers = [query, key, value, out, *given, lse, items.stretches, items.items, None]
    strides = [stride for x in (query, key, value) for stride in x.stride()[:2]]
    heads = [query.shape[1], key.shape[1], query.shape[2]]
    numbers = [
        len(items.items),
        *heads,
        *strides,
        query.dtype == torch.bfloat16,
        bool(grads),
        has_units() and WORTH_UNITS[query.dtype],
    ]
    arguments = Arguments(*(None if x is None else x.data_ptr() for x in pointers), *numbers, scale)
    run(kernels.hybridflow_attention, arguments, len(items.items) * key.shape[1])
