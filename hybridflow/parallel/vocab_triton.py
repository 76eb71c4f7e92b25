"""Log-probs and entropy of a rank's columns of the logits on a GPU, each way in one Triton kernel.

Forward, a program reads a row once, block by block. Each lane keeps sum exp(d) and sum exp(d) d with d = z - m; where a
block raises the maximum m, the lane's sums follow: with l = m_old - m_new, sum exp(d) d becomes
exp(l) (sum exp(d) d + l sum exp(d)). Backward, a program reads one block of a row and writes the gradient over the
block. A row's sums have one order and no program waits for another, so that results are the same bits each time.

`parallel.vocab` chooses these functions; what they give and take is written there, at `VocabKernels`.
"""

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not needed on a CPU
    triton = None

HAS_TRITON = triton is not None
COLUMNS, WARPS = 4096, 8  # of a block: 16 a thread


def partial_sums(logits: Tensor, columns: int, targets: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    _check(logits)
    rows = len(logits)
    peak, sums = divisors.new_empty(rows), divisors.new_empty(3, rows)
    sums_kernel[(rows,)](
        logits,
        targets,
        divisors,
        peak,
        sums,
        rows=rows,
        columns=columns,
        stride=logits.stride(0),
        COLUMNS=_block(columns),
        num_warps=WARPS,
    )
    return peak, sums


def gradients(
    logits: Tensor,
    columns: int,
    targets: Tensor,
    divisors: Tensor,
    *,
    normalizer: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    _check(logits)
    of_log_probs, of_entropy = (None if x is None else x.float().contiguous() for x in (grad_log_probs, grad_entropy))
    block = _block(logits.shape[1])
    gradients_kernel[(len(logits), -(-logits.shape[1] // block))](
        logits,
        targets,
        divisors,
        normalizer.contiguous(),
        entropy.contiguous(),
        grad_log_probs=of_log_probs,
        grad_entropy=of_entropy,
        columns=columns,
        all_columns=logits.shape[1],
        stride=logits.stride(0),
        COLUMNS=block,
        num_warps=WARPS,
    )


def _check(logits: Tensor) -> None:
    assert logits.stride(1) == 1, f"strides {logits.stride()}: the columns of a row must be neighbours"


def _block(columns: int) -> int:
    return min(COLUMNS, 1 << (columns - 1).bit_length())


# ------------------------------------------------------------------------------------------------------ kernels


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def sums_kernel(
        logits: tl.tensor,
        targets: tl.tensor,
        divisors: tl.tensor,
        peak: tl.tensor,
        sums: tl.tensor,
        rows: tl.tensor,
        columns: tl.tensor,
        stride: tl.tensor,
        COLUMNS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        scale = 1.0 / tl.load(divisors + row)
        lane = tl.arange(0, COLUMNS)
        exp_sum = tl.zeros([COLUMNS], tl.float32)
        weighted = tl.zeros([COLUMNS], tl.float32)
        largest = -3.4028234e38  # finite, so that no difference of two maxima is undefined
        for start in range(0, columns, COLUMNS):
            inside = start + lane < columns
            z = tl.load(logits + start + lane, mask=inside, other=-float("inf")).to(tl.float32) * scale
            raised = tl.maximum(largest, tl.max(z, axis=0))
            lower = largest - raised
            factor = tl.exp(lower)
            # the first block is infinitely above what is there, which is nothing
            weighted = tl.where(factor > 0, (weighted + exp_sum * lower) * factor, 0.0)
            exp_sum *= factor
            d = z - raised
            e = tl.exp(d)
            exp_sum += e
            weighted += tl.where(inside, e * d, 0.0)
            largest = raised
        target = tl.load(targets + row)
        z = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32) * scale
        tl.store(peak + row, largest)
        tl.store(sums + row, tl.sum(exp_sum, axis=0))
        tl.store(sums + rows + row, tl.sum(weighted, axis=0))
        tl.store(sums + 2 * rows + row, tl.where(target >= 0, z - largest, 0.0))

    @triton.jit  # type: ignore[untyped-decorator]
    def gradients_kernel(
        logits: tl.tensor,
        targets: tl.tensor,
        divisors: tl.tensor,
        normalizer: tl.tensor,
        entropy: tl.tensor,
        grad_log_probs: tl.tensor,
        grad_entropy: tl.tensor,
        columns: tl.tensor,
        all_columns: tl.tensor,
        stride: tl.tensor,
        COLUMNS: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        logits += row * stride
        scale = 1.0 / tl.load(divisors + row)
        inside = column < columns
        z = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32) * scale
        log_p = z - tl.load(normalizer + row)
        p = tl.exp(log_p)
        grad = tl.zeros([COLUMNS], tl.float32)
        if grad_log_probs is not None:
            g = tl.load(grad_log_probs + row)
            grad = tl.where(column == tl.load(targets + row), g, 0.0) - g * p
        if grad_entropy is not None:
            grad -= tl.load(grad_entropy + row) * (p * (log_p + tl.load(entropy + row)))
        grad = tl.where(inside, grad * scale, 0.0)
        tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < all_columns)
