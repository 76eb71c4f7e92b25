"""Core attention on a CPU: by the kernels in C; where there are none, what torch has there for log-sum-exps.

`models.layer_classes` opens this door.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.cpu.kernels import attention as kernels
from hybridflow.cpu.kernels.attention import Items
from hybridflow.cpu.kernels.layers import rotate

Groups = tuple[tuple[int, tuple[int, ...]], ...]  # prompts, and the lengths of all that follow each


class SharedPromptsLike(Protocol):
    """`models.shared_prompt.SharedPrompts`."""

    @property
    def prompts(self) -> slice: ...
    @property
    def responses(self) -> slice: ...
    @property
    def lengths(self) -> Groups: ...


class Packed(Protocol):
    """`models.attention.PackedSequences`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def shared(self) -> SharedPromptsLike | None: ...


def attend(query: Tensor, key: Tensor, value: Tensor, *, packed: Packed, scale: float) -> Tensor:
    """(tokens, heads, head_dim) from query and grouped key, value: causal, shared prompts included."""
    return kernels.attend(query, key, value, items_of(packed.lengths, packed.shared), scale=scale)


def items_of(lengths: tuple[int, ...], shared: SharedPromptsLike | None) -> Items:
    """Sequences by themselves, and prompts with what follows them, as they lie one after another."""
    if shared is None:
        return _items(lengths, 0, 0, 0, ())
    return _items(lengths, shared.prompts.start, shared.prompts.stop, shared.responses.stop, shared.lengths)


@lru_cache(maxsize=1 << 6)  # every layer of a micro-batch asks for the same
def _items(lengths: tuple[int, ...], start: int, middle: int, stop: int, groups: Groups) -> Items:
    """Prompts lie from `start` to `middle`, what follows them from there to `stop`."""
    stretches = [(end - length, length) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    prompts = iter([x for x in stretches if start <= x[0] < middle])
    responses = iter([x for x in stretches if middle <= x[0] < stop])
    together = [[next(prompts), *islice(responses, len(followers))] for _, followers in groups]
    alone = [x for x in stretches if not start <= x[0] < stop]
    return Items.from_stretches(alone, together)


class RotateInC(torch.autograd.Function):
    """Rotary embedding (Su et al. 2021, eq. 34): dimension i turns with i + n.

    x: (t, heads, head_dim), of which the first 2 n dimensions turn; cos, sin: (t, 1, n).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `RotateInC`."""
    y: Tensor = RotateInC.apply(x, cos, sin)
    return y


# ------------------------------------------------------------------------------------------- without a compiler


class SpansLike(Protocol):
    """`models.shared_prompt.Spans`."""

    @property
    def causal(self) -> bool: ...
    def runs(self) -> list[tuple[int, int, int]]: ...


def flash_forward(query: Tensor, key: Tensor, value: Tensor, spans: SpansLike, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps by torch's CPU kernel, once for every run of stretches of equal lengths."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = [
        kernel(*qkv, 0.0, spans.causal, scale=scale)
        for qkv in zip(
            batches(query, spans.runs(), 1), batches(key, spans.runs(), 2), batches(value, spans.runs(), 2), strict=True
        )
    ]
    out, lse = zip(*found, strict=True)
    return in_a_row(out), in_a_row(lse).contiguous()


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: SpansLike,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """In the log-sum-exp's dtype: in bfloat16 torch's backward kernel takes up to ten times as long as in float32."""
    kernel, runs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, spans.runs()
    tensors = [x.to(lse.dtype) for x in (grad, query, key, value, out, lse)]
    blocks = [batches(x, runs, side) for x, side in zip(tensors, (1, 1, 2, 2, 1, 1), strict=True)]
    found = [kernel(*block, 0.0, spans.causal, scale=scale) for block in zip(*blocks, strict=True)]
    dq, dk, dv = (in_a_row(parts) for parts in zip(*found, strict=True))
    return dq, dk, dv


def batches(x: Tensor, runs: list[tuple[int, int, int]], side: int) -> Iterator[Tensor]:
    """(tokens, heads, ...) -> of every run (count, heads, length, ...); side: 1 for queries' lengths, 2 for keys'."""
    parts = x.split([run[0] * run[side] for run in runs])
    return (part.unflatten(0, (run[0], run[side])).transpose(1, 2) for part, run in zip(parts, runs, strict=True))


def in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """What `batches` has taken apart."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    return torch.cat(rows) if len(rows) > 1 else rows[0]
