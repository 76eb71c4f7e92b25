"""Matrix products on CPUs where torch's own library leaves half of the machine idle.

torch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's CPUs alone, and their matrix units not at all.
Where there are such units, `aten::mm` and `aten::addmm` go to them (`cpu/kernels/matrix.py`): 1.1 to 1.8 times as
fast, and as exact. On other makers' CPUs with AVX-512 they go to oneDNN, which torch brings along for other purposes:
on a Zen 5 it multiplies 2.2 times as fast (tests.bench.products). That is for training, backward passes and the engine
alike.
Other types are oneDNN's already.
"""

import functools
import warnings
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.types import Number

from hybridflow.cpu.kernels import matrix
from hybridflow.cpu.kernels.matrix import has_units

WORTH_A_COPY = 64  # rows: with fewer, closing the gaps of a weight takes longer than it saves
WORTH_TILES = 64  # rows, inner dimensions and columns: with fewer, more is packed than multiplied
WORTH_IT = 1 << 21  # multiplications: below, what oneDNN does around a product takes longer than it saves


@functools.cache
def use_fast_products() -> bool:
    """Whether products of this process, from now on, may go elsewhere than torch has them go."""
    if not (mkl_is_slow() or torch.cpu._is_amx_tile_supported()):
        return False
    library = torch.library.Library("aten", "IMPL")
    mm, addmm = (torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "addmm"))

    def fast_mm(keys: DispatchKeySet, a: Tensor, b: Tensor) -> Tensor:
        way = way_of(a, b)
        if way is None:
            result: Tensor = mm.call_boxed(keys, a, b)
            return result
        return way(a, b)

    def fast_addmm(
        keys: DispatchKeySet, bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1
    ) -> Tensor:
        plain = bias.dim() == 1 and len(bias) == b.shape[1] and beta == 1 and alpha == 1
        way = way_of(a, b) if plain else None
        if way is None:
            result: Tensor = addmm.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)
            return result
        return way(a, b, bias.contiguous())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced is meant
        library.impl("mm", fast_mm, "CPU", with_keyset=True, allow_override=True)
        library.impl("addmm", fast_addmm, "CPU", with_keyset=True, allow_override=True)
    _libraries.append(library)
    return True


_libraries: list[torch.library.Library] = []  # what one has registered goes with it


class ProductFunction(Protocol):
    """a b + bias, contiguous; float32 (m, k), (k, n), (n,)."""

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor: ...


def way_of(a: Tensor, b: Tensor) -> ProductFunction | None:
    """None: torch's."""
    if not a.dtype == b.dtype == torch.float32 or a.shape[0] * a.shape[1] * b.shape[1] < WORTH_IT:
        return None
    if has_units():
        return by_units if min(*a.shape, b.shape[1]) >= WORTH_TILES else None
    return product if mkl_is_slow() and (a.shape[0] >= WORTH_A_COPY or _has_no_gaps(b)) else None


def compiles_for_shapes(dtype: torch.dtype) -> bool:
    """Whether products of this type compile a kernel for each shape that they meet, by oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float32 and mkl_is_slow() and not has_units())


def repeated(rows: int) -> int:
    """At least so many rows, by at most a 32nd more, of which there are few: 32 from each power of two to the next.

    A shape that oneDNN has not met costs it 2 to 3 ms, which is more than most products take.
    """
    granule = 1 << max(0, rows.bit_length() - 6)
    return -(-rows // granule) * granule


def by_units(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias by the matrix units."""
    result = matrix.product(a, b)
    return result if bias is None else result.add_(bias)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias by oneDNN, contiguous; float32 (m, k), (k, n), (n,).

    It reads b by rows or by columns, a by rows alone, and takes a thousand times as long where there are gaps between
    them. Where a lies by columns, as in the gradient of a weight, either a or both b and the result are turned around.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    if bias is None and a.t().is_contiguous() and (inner + rows) * columns < rows * inner:
        return _linear(b.t().contiguous(), a).t().contiguous()
    if not _has_no_gaps(b):
        b = b.t().contiguous().t() if b.stride(0) == 1 else b.contiguous()  # in the order that it has
    return _linear(a.contiguous(), b.t(), bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def _has_no_gaps(b: Tensor) -> bool:
    return b.is_contiguous() or b.t().is_contiguous()


@functools.cache
def mkl_is_slow() -> bool:
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and not _is_intel()
    )


def _is_intel() -> bool:
    """True where /proc does not say: then nothing is changed."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
