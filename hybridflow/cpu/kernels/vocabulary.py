"""Log-probabilities and entropy of logits on a CPU, and their gradients, row by row: `vocabulary.c`, called.

`parallel.vocab` opens this door, and says at `VocabKernels` what the two functions give and take. Float32 within.
"""

import ctypes

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run

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
    peak, sums = torch.empty(logits.shape[0]), torch.empty(3, logits.shape[0])
    _call(logits, columns, targets, divisors, peak=peak, sums=sums)
    return peak, sums


def gradients(logits: Tensor, columns: int, targets: Tensor, divisors: Tensor, **of_rows: Tensor | None) -> None:
    given = {name: x.contiguous() for name, x in of_rows.items() if x is not None}
    _call(logits, columns, targets, divisors, backward=True, **given)


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
