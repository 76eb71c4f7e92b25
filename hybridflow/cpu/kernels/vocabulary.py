"""Log-probabilities and entropy of logits on a CPU, and their gradients, row by row: `vocabulary.c`, called.

For what `takes` says yes to; float32 within. `parallel/vocab.py` puts together what ranks have of a row.
"""

import ctypes

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import library
from hybridflow.cpu.kernels.threads import fields, run

BLOCK = 16  # rows that a thread takes at a time: of vocabulary.c


class Vocabulary(ctypes.Structure):
    """That of vocabulary.c."""

    _fields_ = fields(
        [
            *("logits", "targets", "divisors", "peak", "sums"),
            *("normalizer", "entropy", "grad_log_probs", "grad_entropy", "next"),
        ],
        ["rows", "columns", "padded", "row", "divisor", "backward", "bfloat16"],
    )


def partial_sums(logits: Tensor, columns: int, targets: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """(m, sums) of z = logits / divisor: m = max z (R,); (3, R) sum exp(z - m), sum exp(z - m)(z - m), z_y - m.

    Args:
        logits: (R, padded columns), of which the first `columns`, at least one, count.
        targets: (R,) int64, y; negative where y is none of these columns: then y's term is 0.
        divisors: float32 (R,) or (1,).
    """
    peak, sums = torch.empty(logits.shape[0]), torch.empty(3, logits.shape[0])
    _call(logits, columns, targets, divisors, peak=peak, sums=sums)
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
    """Those of log-probs g and of the entropy H, h, over the logits; 0 in the padding.

    With log p_j = z_j - normalizer:  (g ([j = y] - p_j) - h p_j (log p_j + H)) / divisor.
    """
    both = {"grad_log_probs": grad_log_probs, "grad_entropy": grad_entropy}
    given = {name: g.contiguous() for name, g in both.items() if g is not None}
    _call(logits, columns, targets, divisors, backward=True, normalizer=normalizer, entropy=entropy, **given)


def _call(
    logits: Tensor, columns: int, targets: Tensor, divisors: Tensor, *, backward: bool = False, **others: Tensor
) -> None:
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    assert logits.stride(1) == 1 and targets.is_contiguous() and divisors.is_contiguous(), "as they are read"
    assert divisors.dtype == torch.float32 and all(x.dtype == torch.float32 for x in others.values()), (
        "as they are read"
    )
    arguments = Vocabulary(
        logits=logits.data_ptr(),
        targets=targets.data_ptr(),
        divisors=divisors.data_ptr(),
        **{name: x.data_ptr() for name, x in others.items()},
        rows=logits.shape[0],
        columns=columns,
        padded=logits.shape[1],
        row=logits.stride(0),
        divisor=int(len(divisors) > 1),
        backward=backward,
        bfloat16=logits.dtype == torch.bfloat16,
    )
    run(kernels.hybridflow_vocabulary, arguments, -(-logits.shape[0] // BLOCK))
