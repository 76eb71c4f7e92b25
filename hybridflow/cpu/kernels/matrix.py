"""Products of matrices by the matrix units of a CPU (Intel's AMX): `matrix.c`, called.

A float32 product is as exact as one of float32 arithmetic, and takes 0.55 to 0.95 of the time (tests.bench.products);
how, `tiles.h` says. What such units cannot show is a number below 1e-38 (it is zero) and an infinity (it is a NaN).
"""

import ctypes
import functools

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run

SIDE = 32  # rows and columns of a block: of tiles.h
WIDTH = 768  # columns at a time, for each of which a is read again: of matrix.c
DEPTH = 512  # inner numbers at a time, about: c is read and written for each


class MatrixInC(ctypes.Structure):
    """That of matrix.c."""

    _fields_ = fields(
        ["a", "b", "c", "next"],
        [
            *("rows", "inner", "columns", "a_row", "a_inner", "b_inner", "b_column", "c_row", "c_column"),
            *("adds", "share", "bfloat16"),
        ],
    )


_given_up: list[bool] = []  # whether this process leaves them alone


def has_units() -> bool:
    """Whether this process multiplies by them: the CPU has them, and there are kernels."""
    kernels = library()
    return kernels is not None and not _given_up and _permitted(kernels)


def do_without() -> None:
    """From now on this process does."""
    _given_up.append(True)


@functools.cache
def _permitted(kernels: ctypes.CDLL) -> bool:
    return bool(kernels.hybridflow_matrix_units())


def product(a: Tensor, b: Tensor, *, to: Tensor | None = None) -> Tensor:
    """a b of (m, k) and (k, n), both float32 or both bfloat16: float32 (m, n), contiguous, new or added to `to`.

    Where `has_units`. Sums do not depend on the number of threads.
    """
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    a, b = _dense(a), _dense(b)
    (rows, inner), columns = a.shape, b.shape[1]
    c = torch.empty(rows, columns) if to is None else to
    assert a.dtype == b.dtype and c.dtype == torch.float32 and c.is_contiguous() and c.shape == (rows, columns)
    if not inner or not c.numel():
        return c.zero_() if to is None else c
    c_strides = (columns, 1)
    if _packing(a, b) > _packing(b.t(), a.t(), turns_c=True):  # c^T = b^T a^T; not by threads, as sums differ
        a, b, rows, columns, c_strides = b.t(), a.t(), columns, rows, (1, columns)
    share = -(-rows // torch.get_num_threads() // SIDE) * SIDE
    arguments = MatrixInC(
        a.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        None,
        *(rows, inner, columns, *a.stride(), *b.stride(), *c_strides, to is not None, share, a.dtype == torch.bfloat16),
    )
    run(kernels.hybridflow_matrix, arguments, -(-rows // share))
    return c


def _dense(x: Tensor) -> Tensor:
    """Rows or columns whose numbers lie side by side."""
    return x if 1 in x.stride() else x.contiguous()


def _packing(a: Tensor, b: Tensor, *, turns_c: bool = False) -> int:
    """Numbers that are packed to multiply so; what is turned around, a by columns and b by rows, counts twice."""
    (rows, inner), columns = a.shape, b.shape[1]
    of_a = a.numel() * -(-columns // WIDTH) * (1 if a.stride(1) == 1 else 2)
    of_b = b.numel() * (2 if b.stride(0) == 1 else 1)
    of_c = 2 * rows * columns * -(-inner // DEPTH) if turns_c else 0
    return of_a + of_b + of_c
