"""Products of few rows with a weight on a CPU: `linear.c`, called.

Libraries turn a weight (outputs, inner) around before they multiply, or wait for each weight line, which with few rows
is most of the work. Here it is read once, and fetched ahead (tests.bench.few_rows).
"""

import ctypes

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run
from hybridflow.cpu.kernels.matrix import has_units

BLOCK = 64  # outputs that a thread takes at a time: of linear.c
FEWEST = {torch.float32: 17, torch.bfloat16: 1}  # rows for which matrix units pay (tests.bench.few_rows)


class Linear(ctypes.Structure):
    """That of linear.c."""

    _fields_ = fields(
        ["x", "weight", "bias", "y", "next"], ["rows", "inner", "outputs", "x_row", "weight_row", "bfloat16", "units"]
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + b of x (rows, inner), weight (outputs, inner) and bias (outputs,), all that `takes` says yes to.

    Sums do not depend on the number of threads. Up to 8 rows (15 in bfloat16), and with more, the bits of a row do not
    depend on the others.
    """
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    assert bias is None or (bias.is_contiguous() and bias.dtype == x.dtype), "as the kernel reads it"
    x, weight = _by_rows(x), _by_rows(weight)
    (rows, inner), outputs = x.shape, weight.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype)
    arguments = Linear(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        rows=rows,
        inner=inner,
        outputs=outputs,
        x_row=x.stride(0),
        weight_row=weight.stride(0),
        bfloat16=x.dtype == torch.bfloat16,
        units=units_pay(rows, x.dtype),
    )
    run(kernels.hybridflow_linear, arguments, -(-outputs // BLOCK))
    return y


def units_pay(rows: int, dtype: torch.dtype) -> bool:
    """Whether so many rows are multiplied by the CPU's matrix units. In float32 the weight is packed for them first."""
    return has_units() and rows >= FEWEST[dtype]


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
