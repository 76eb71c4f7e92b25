"""Copies of tokens in rows by expert, and sums of such rows by token: what stands around the products of experts.

    rows_of(tokens)   row i = the token whose copy the row is            backward: the sum of a token's rows
    sums_of(rows)     a token's output = the sum of the token's rows     backward: a row has the token's gradient

A gather is the other's gradient: nothing is added by index, so that a sum has one order, that of a token's choices.

`ExpertKernels` says how the order is found and how rows are gathered and summed: by torch here, which sorts, and on
GPUs by Triton (`expert_triton`), which counts. `models.layer_classes` chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.models.layers import Function

Move = Callable[[Tensor], Tensor]  # of rows


@dataclass(frozen=True)
class ExpertOrder:
    """Where the copies of tokens stand by expert. Copy c is choice c % k of token c // k.

    ends: (experts,) int32, where each expert's rows end. copies: (r,) each row's c; rows from ends[-1] on,
    if there are any, are of no expert and hold anything. positions: (t, k) int32, the row of each copy, -1 of a copy
    that has none; None where the kernels need none. shape: (t, k).
    """

    ends: Tensor
    copies: Tensor
    positions: Tensor | None
    shape: tuple[int, int]

    def cut(self, num_rows: int) -> "ExpertOrder":
        """Without the rows that are of no expert."""
        return replace(self, copies=self.copies[:num_rows])

    @property
    def is_whole(self) -> bool:
        """Whether every copy has a row."""
        return len(self.copies) == self.shape[0] * self.shape[1]


class ExpertKernels(Protocol):
    """What is done with rows of experts on a device."""

    def order(self, experts: Tensor, num_experts: int, num_rows: int | None) -> ExpertOrder:
        """experts: (t, k) numbers; a copy of another number than 0 to num_experts - 1 has no row.

        num_rows: how many copies have a row, where the caller knows. With None, kernels make rows for all copies, or
        read that number back.
        """

    def rows(self, tokens: Tensor, order: ExpertOrder) -> Tensor:
        """(t, size) -> (r, size)."""

    def sums(self, rows: Tensor, order: ExpertOrder) -> Tensor:
        """(r, size) -> (t, size)."""

    def activated(self, x: Tensor, shares: Tensor, order: ExpertOrder) -> Tensor:
        """(r, 2 f) [gate; up], (t, k) float32 -> (r, f): silu(gate) up times the copy's share, in the dtype of x."""


def rows_of(tokens: Tensor, order: ExpertOrder, kernels: ExpertKernels) -> Tensor:
    """(t, size) -> (r, size): of each row the token."""
    rows: Tensor = _WithGradient.apply(tokens, partial(kernels.rows, order=order), partial(kernels.sums, order=order))
    return rows


def sums_of(rows: Tensor, order: ExpertOrder, kernels: ExpertKernels) -> Tensor:
    """(r, size) -> (t, size): of each token the sum of the token's rows."""
    sums: Tensor = _WithGradient.apply(rows, partial(kernels.sums, order=order), partial(kernels.rows, order=order))
    return sums


class _WithGradient(torch.autograd.Function):
    """forward(x), whose gradient is backward(gradient): one is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.move_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.move_back(grad), None, None


class KernelsByTorch:
    """Of any device; sizes are read back from the device where some copies have no row.

    swiglu: of [gate; up]. Shares are multiplied in behind it.
    """

    def __init__(self, swiglu: Function) -> None:
        self._swiglu = swiglu

    def order(self, experts: Tensor, num_experts: int, num_rows: int | None) -> ExpertOrder:
        """See `ExpertKernels`."""
        flat = experts.flatten()
        expert_of_copy = flat.where((flat >= 0) & (flat < num_experts), num_experts)
        sorted_experts, copies = expert_of_copy.sort(stable=True)
        expert_ids = torch.arange(num_experts, device=experts.device)
        ends = torch.searchsorted(sorted_experts, expert_ids, right=True, out_int32=True)  # bincount would synchronize
        rows = int(ends[-1]) if num_rows is None else num_rows
        return ExpertOrder(ends, copies[:rows], None, (experts.shape[0], experts.shape[1]))

    def rows(self, tokens: Tensor, order: ExpertOrder) -> Tensor:
        """See `ExpertKernels`."""
        return tokens.index_select(0, order.copies // order.shape[1])

    def sums(self, rows: Tensor, order: ExpertOrder) -> Tensor:
        """See `ExpertKernels`."""
        shape = order.shape[0] * order.shape[1], rows.shape[1]
        by_copy = rows.new_empty(shape) if order.is_whole else rows.new_zeros(shape)
        by_token: Tensor = by_copy.index_copy_(0, order.copies, rows).unflatten(0, order.shape)
        return by_token.sum(1)

    def activated(self, x: Tensor, shares: Tensor, order: ExpertOrder) -> Tensor:
        """See `ExpertKernels`."""
        activated_rf: Tensor = self._swiglu.apply(x)
        return (activated_rf * shares.flatten()[order.copies, None]).to(activated_rf.dtype)
