"""Rows of experts on a GPU by Triton kernels: copies of tokens are counted, not sorted, and no size is read back.

    counts   each block of copies counts its copies of each expert
    places   a copy's row = where its expert's rows begin + such copies of earlier blocks + earlier ones of its block
    rows     a row is copied from its token
    sums     a token's rows are added in the order of its choices, in float32, and rounded once
    swiglu   silu(gate) up share of a row, in float32, rounded once; its gradients, and that of the share

Rows from ends[-1] on are left as they are: a program looks at ends[-1] on the device. Every sum has one order, so that
results are the same bits each time. What the functions give and take is written at `expert_rows.ExpertKernels`.
"""

from typing import Any

import torch
from torch import Tensor

from hybridflow.models.expert_rows import ExpertOrder

try:
    import triton
    import triton.language as tl
except ImportError:  # not needed on a CPU
    triton = None

HAS_TRITON = triton is not None
COPIES, COUNTING_WARPS = 32, 8  # of a block that counts: of 512 experts 64 a thread
COLUMNS, WARPS = 1024, 4  # of a block of a row


class KernelsByTriton:
    """See `expert_rows.ExpertKernels`. counts_on_device: `order` makes rows for all copies where num_rows is None.
    False: in passes with gradients the host reads the number of rows back."""

    def __init__(self, *, counts_on_device: bool = True) -> None:
        self._counts_on_device = counts_on_device

    def order(self, experts: Tensor, num_experts: int, num_rows: int | None) -> ExpertOrder:
        """See `ExpertKernels`."""
        numbers, device = experts.contiguous(), experts.device
        copies, blocks = experts.numel(), max(1, -(-experts.numel() // COPIES))
        counts = torch.zeros(num_experts, blocks, dtype=torch.int32, device=device)
        options = {"num_copies": copies, "num_experts": num_experts, "blocks": blocks, "COPIES": COPIES}
        options["num_warps"] = COUNTING_WARPS
        options["EXPERTS"] = 1 << max(num_experts - 1, 1).bit_length()
        if copies:
            counts_kernel[(blocks,)](numbers, counts, **options)
        through = counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts)
        order = torch.empty(copies, dtype=torch.int32, device=device)
        positions = torch.empty(experts.shape, dtype=torch.int32, device=device)
        if copies:
            places_kernel[(blocks,)](numbers, through - counts, positions, order, **options)
        ends = through[:, -1].contiguous()
        if num_rows is None and not self._counts_on_device and torch.is_grad_enabled():
            num_rows = int(ends[-1])
        return ExpertOrder(ends, order[:num_rows], positions, (experts.shape[0], experts.shape[1]))

    def rows(self, tokens: Tensor, order: ExpertOrder) -> Tensor:
        """See `ExpertKernels`."""
        tokens = tokens.contiguous()
        rows = tokens.new_empty(len(order.copies), tokens.shape[1])
        if rows.numel():
            rows_kernel[_grid(rows)](
                tokens, order.copies, order.ends[-1:], rows, k=order.shape[1], **_columns(rows.shape[1])
            )
        return rows

    def sums(self, rows: Tensor, order: ExpertOrder) -> Tensor:
        """See `ExpertKernels`."""
        rows = rows.contiguous()
        sums = rows.new_empty(order.shape[0], rows.shape[1])
        if sums.numel():
            sums_kernel[_grid(sums)](rows, order.positions, sums, k=order.shape[1], **_columns(sums.shape[1]))
        return sums

    def activated(self, x: Tensor, shares: Tensor, order: ExpertOrder) -> Tensor:
        """See `ExpertKernels`."""
        y: Tensor = SharedSwiGLU.apply(x, shares, order)
        return y


class SharedSwiGLU(torch.autograd.Function):
    """y = silu(gate) up s of each row, s the share of the row's copy.

    With c = sigmoid(gate):  dgate = dy up s c (1 + gate (1 - c)),  dup = dy gate c s,  ds = sum(dy gate c up).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor, order: ExpertOrder) -> Tensor:
        x, shares = x.contiguous(), shares.contiguous()
        ctx.save_for_backward(x, shares)
        ctx.order = order
        y = x.new_empty(len(x), x.shape[1] // 2)
        if y.numel():
            swiglu_kernel[_grid(y)](x, shares, order.copies, order.ends[-1:], y, **_columns(y.shape[1]))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, shares = ctx.saved_tensors
        grad_x, grad_shares = torch.empty_like(x), torch.zeros_like(shares)
        if grad_x.numel():
            swiglu_backward_kernel[(len(x),)](
                grad.contiguous(),
                x,
                shares,
                ctx.order.copies,
                ctx.order.ends[-1:],
                grad_x=grad_x,
                grad_shares=grad_shares,
                **_columns(grad.shape[1]),
            )
        return grad_x, grad_shares, None


def _columns(columns: int) -> dict[str, int]:
    return {"columns": columns, "COLUMNS": _block(columns), "num_warps": WARPS}


def _grid(rows: Tensor) -> tuple[int, int]:
    return len(rows), -(-rows.shape[1] // _block(rows.shape[1]))


def _block(columns: int) -> int:
    return min(COLUMNS, 1 << (columns - 1).bit_length())


# ------------------------------------------------------------------------------------------------------ kernels


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def chosen_of(
        numbers: tl.tensor,
        num_copies: tl.tensor,
        num_experts: tl.tensor,
        COPIES: tl.constexpr,
        EXPERTS: tl.constexpr,
    ) -> tl.tensor:
        """(copies of this block, experts) 1 where the copy is of the expert."""
        copy = tl.program_id(0) * COPIES + tl.arange(0, COPIES)
        number = tl.load(numbers + copy, mask=copy < num_copies, other=-1)
        expert = tl.arange(0, EXPERTS)
        here = (number[:, None] == expert[None, :]) & (expert < num_experts)[None, :]
        return here.to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator]
    def counts_kernel(
        numbers: tl.tensor,
        counts: tl.tensor,
        num_copies: tl.tensor,
        num_experts: tl.tensor,
        blocks: tl.tensor,
        COPIES: tl.constexpr,
        EXPERTS: tl.constexpr,
    ) -> None:
        here = chosen_of(numbers, num_copies, num_experts, COPIES, EXPERTS)
        expert = tl.arange(0, EXPERTS)
        tl.store(counts + expert * blocks + tl.program_id(0), tl.sum(here, axis=0), mask=expert < num_experts)

    @triton.jit  # type: ignore[untyped-decorator]
    def places_kernel(
        numbers: tl.tensor,
        begins: tl.tensor,
        positions: tl.tensor,
        order: tl.tensor,
        num_copies: tl.tensor,
        num_experts: tl.tensor,
        blocks: tl.tensor,
        COPIES: tl.constexpr,
        EXPERTS: tl.constexpr,
    ) -> None:
        here = chosen_of(numbers, num_copies, num_experts, COPIES, EXPERTS)
        expert = tl.arange(0, EXPERTS)
        begin = tl.load(begins + expert * blocks + tl.program_id(0), mask=expert < num_experts, other=0)
        place = tl.sum(here * (begin[None, :] + tl.cumsum(here, axis=0) - 1), axis=1)
        is_here = tl.sum(here, axis=1) > 0
        copy = tl.program_id(0) * COPIES + tl.arange(0, COPIES)
        tl.store(positions + copy, tl.where(is_here, place, -1), mask=copy < num_copies)
        tl.store(order + place, copy, mask=is_here)

    @triton.jit  # type: ignore[untyped-decorator]
    def rows_kernel(
        tokens: tl.tensor,
        copies: tl.tensor,
        num_rows: tl.tensor,
        rows: tl.tensor,
        k: tl.tensor,
        columns: tl.tensor,
        COLUMNS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        if row < tl.load(num_rows):
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            token = (tl.load(copies + row) // k).to(tl.int64)
            values = tl.load(tokens + token * columns + column, mask=column < columns)
            tl.store(rows + row * columns + column, values, mask=column < columns)

    @triton.jit  # type: ignore[untyped-decorator]
    def sums_kernel(
        rows: tl.tensor,
        positions: tl.tensor,
        sums: tl.tensor,
        k: tl.tensor,
        columns: tl.tensor,
        COLUMNS: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for choice in range(0, k):
            row = tl.load(positions + token * k + choice).to(tl.int64)
            if row >= 0:
                total += tl.load(rows + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        tl.store(sums + token * columns + column, total.to(sums.dtype.element_ty), mask=column < columns)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_kernel(
        x: tl.tensor,
        shares: tl.tensor,
        copies: tl.tensor,
        num_rows: tl.tensor,
        y: tl.tensor,
        columns: tl.tensor,
        COLUMNS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        if row < tl.load(num_rows):
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < columns
            share = tl.load(shares + tl.load(copies + row))
            gate = tl.load(x + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
            product = gate / (1 + tl.exp(-gate)) * up * share
            tl.store(y + row * columns + column, product.to(y.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator]
    def swiglu_backward_kernel(
        grad: tl.tensor,
        x: tl.tensor,
        shares: tl.tensor,
        copies: tl.tensor,
        num_rows: tl.tensor,
        grad_x: tl.tensor,
        grad_shares: tl.tensor,
        columns: tl.tensor,
        COLUMNS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        if row < tl.load(num_rows):
            copy = tl.load(copies + row)
            share = tl.load(shares + copy)
            lane = tl.arange(0, COLUMNS)
            of_share = tl.zeros([COLUMNS], tl.float32)
            for start in range(0, columns, COLUMNS):
                column = start + lane
                inside = column < columns
                gate = tl.load(x + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
                up = tl.load(x + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
                dy = tl.load(grad + row * columns + column, mask=inside, other=0.0).to(tl.float32)
                sigmoid = 1 / (1 + tl.exp(-gate))
                of_share += dy * gate * sigmoid * up
                dgate = dy * up * share * sigmoid * (1 + gate * (1 - sigmoid))
                dup = dy * gate * sigmoid * share
                tl.store(grad_x + row * 2 * columns + column, dgate.to(grad_x.dtype.element_ty), mask=inside)
                tl.store(grad_x + (row * 2 + 1) * columns + column, dup.to(grad_x.dtype.element_ty), mask=inside)
            tl.store(grad_shares + copy, tl.sum(of_share, axis=0))
