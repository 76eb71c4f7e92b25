"""RMSNorm, SwiGLU and rotary embedding on a CPU, each in one pass over memory: `layers.c`, called.

For what `takes` says yes to. bfloat16 is read and written, all between is float32; but for what HuggingFace rounds in
the forward pass. Sums do not depend on the number of threads.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run

BLOCK = 64  # rows that a thread takes at a time: of layers.c
RMS_NORM, ADD_RMS_NORM, RMS_NORM_BACKWARD, SWIGLU, SWIGLU_BACKWARD, ROTATE = range(6)


class RowsInC(ctypes.Structure):
    """That of layers.c."""

    _fields_ = fields(
        ["x", "weight", "grad", "cos", "sin", "beside", "y", "grad_x", "sum", "r", "grad_weight", "next"],
        [
            *("rows", "columns", "what", "bfloat16"),
            *("groups", "heads", "turning", "x_token", "x_group", "y_token", "y_group"),
        ],
        "eps",
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r): y = w x r with r = 1 / sqrt(mean(x^2) + eps) over the last dimension; r (rows, 1) float32."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    r = torch.empty(x.numel() // x.shape[-1], 1)
    _call(RMS_NORM, r.shape[0], x.shape[-1], eps=eps, x=x, weight=weight, y=y, r=r)
    return y, r


def add_rms_norm(x: Tensor, total: Tensor, weight: Tensor, eps: float) -> Tensor:
    """total += x, in place, and the RMSNorm of total. total: contiguous, of x's shape."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    r = torch.empty(x.numel() // x.shape[-1], 1)
    _call(ADD_RMS_NORM, r.shape[0], x.shape[-1], eps=eps, x=x, sum=total, weight=weight, y=y, r=r)
    return y


def sum_and_rms_norm(x: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + other, the sum's RMSNorm, r as of `rms_norm`), of two tensors of one shape."""
    x, other = x.contiguous(), other.contiguous()
    total, y = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2))
    r = torch.empty(x.numel() // x.shape[-1], 1)
    _call(ADD_RMS_NORM, r.shape[0], x.shape[-1], eps=eps, x=x, beside=other, sum=total, weight=weight, y=y, r=r)
    return total, y, r


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, *, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight. With n = x r:  dw = sum(dy n),  dx = r (w dy - n mean(w dy n)) + beside."""
    grad, x, grad_x = grad.contiguous(), x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    parts = torch.empty(-(-r.shape[0] // BLOCK), x.shape[-1])
    beside = None if beside is None else beside.contiguous()
    rows, columns = r.shape[0], x.shape[-1]
    _call(
        RMS_NORM_BACKWARD,
        rows,
        columns,
        grad=grad,
        x=x,
        beside=beside,
        weight=weight,
        r=r,
        grad_x=grad_x,
        grad_weight=parts,
    )
    return grad_x, parts.sum(0).to(weight.dtype)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) up of x, whose last dimension is [gate; up]."""
    columns = x.shape[-1] // 2
    x, y = x.contiguous(), torch.empty((*x.shape[:-1], columns), dtype=x.dtype)
    _call(SWIGLU, y.numel() // columns, columns, x=x, y=y)
    return y


def swiglu_backward(grad: Tensor, x: Tensor, *, over: bool = False) -> Tensor:
    """With s = sigmoid(gate):  d gate = dy up (s + gate s (1 - s)),  d up = dy gate s. over: it takes x's memory."""
    columns = x.shape[-1] // 2
    grad, x = grad.contiguous(), x.contiguous()
    grad_x = x if over else torch.empty(x.shape, dtype=x.dtype)
    _call(SWIGLU_BACKWARD, grad.numel() // columns, columns, grad=grad, x=x, grad_x=grad_x)
    return grad_x


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x (t, heads, head_dim), cos and sin (t, 1, n): dimensions i and i + n turn together, those from 2 n on stay.

    x may have (t, groups, heads, head_dim), where the heads of a group lie side by side. out: memory of x's shape for
    the result, which may be x.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    by_groups = (x, y) if x.dim() == 4 else (x.unsqueeze(2), y.unsqueeze(2))
    tokens, groups, heads, columns = by_groups[0].shape
    assert y.shape == x.shape and y.dtype == x.dtype, "as the kernel writes it"
    assert all(part.stride(-1) == 1 and (heads == 1 or part.stride(-2) == columns) for part in by_groups), (
        "as the kernel reads and writes them"
    )
    (x_token, x_group, *_), (y_token, y_group, *_) = (part.stride() for part in by_groups)
    numbers = {
        **{"groups": groups, "heads": heads, "turning": cos.shape[-1]},
        **{"x_token": x_token, "x_group": x_group, "y_token": y_token, "y_group": y_group},
    }
    _call(ROTATE, tokens, columns, numbers, x=x, cos=cos.contiguous(), sin=sin.contiguous(), y=y)
    return y


def _call(
    what: int,
    rows: int,
    columns: int,
    numbers: Mapping[str, int] | None = None,
    *,
    x: Tensor,
    eps: float = 0.0,
    **others: Tensor | None,
) -> None:
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    pointers = {name: other.data_ptr() for name, other in {"x": x, **others}.items() if other is not None}
    of = {"rows": rows, "columns": columns, "what": what, "bfloat16": x.dtype == torch.bfloat16, **(numbers or {})}
    arguments = RowsInC(**pointers, **of, eps=eps)
    run(kernels.hybridflow_rows, arguments, -(-rows // BLOCK))
