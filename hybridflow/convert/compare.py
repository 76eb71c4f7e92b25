"""Two tensors of checkpoints, compared bit by bit in pieces of bounded size; and tensors rounded to another dtype."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.architecture.weight_files import MegatronDirectory
from hybridflow.errors import CheckpointError
from hybridflow.formats.safetensors_files import ALL, SafetensorsDirectory, TensorInfo

CheckpointFiles = SafetensorsDirectory | MegatronDirectory

PIECE_BYTES = 64 << 20
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_difference(
    one: tuple[CheckpointFiles, str],
    other: tuple[CheckpointFiles, str],
    info: TensorInfo,
    *,
    compared: Callable[[int], None] = lambda num_bytes: None,
) -> str | None:
    """How many elements differ, and the first that does; None where every bit is equal.

    Bits are compared, not values: 0.0 and -0.0 differ, and NaNs are equal where their bits are.
    """
    count, first = 0, None
    for rows in row_pieces(info):
        a, b = (files.read(name, info.shape, rows) for files, name in (one, other))
        if not torch.equal(_bits(a), _bits(b)):
            unequal = (_bits(a) != _bits(b)).nonzero()
            count += len(unequal)
            first = first or _element(a, b, unequal[0].tolist(), rows.start or 0)
        compared(a.nbytes)
    return f"{count:,} of {torch.Size(info.shape).numel():,} elements differ, the first {first}" if count else None


def row_pieces(info: TensorInfo) -> Iterator[slice]:
    if not info.shape:
        yield ALL
        return
    num_rows = info.shape[0]
    row_bytes = torch.Size(info.shape[1:]).numel() * info.dtype.itemsize
    step = max(PIECE_BYTES // max(row_bytes, 1), 1)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.itemsize])


def _element(a: Tensor, b: Tensor, index: list[int], first_row: int) -> str:
    where = [index[0] + first_row, *index[1:]] if index else []
    shown = [f"{float(x[tuple(index)])!r} (bits {_hexadecimal(x[tuple(index)])})" for x in (a, b)]
    return f"at {where}: {shown[0]} and {shown[1]}"


def _hexadecimal(element: Tensor) -> str:
    width = 8 * element.itemsize
    return f"{int(_bits(element)) % (1 << width):#0{width // 4 + 2}x}"


def read_cast(files: CheckpointFiles, name: str, *, infos: Mapping[str, TensorInfo]) -> Tensor:
    """A tensor, in the dtype that `infos` says. Errors: CheckpointError where a number is too large for it."""
    shape, dtype = infos[name]
    if dtype == files.tensors[name].dtype:
        return files.read(name, shape)
    cast = torch.empty(shape, dtype=dtype)
    for rows in row_pieces(files.tensors[name]):  # the whole tensor is held once, in the new dtype
        cast[rows] = rounded(files.read(name, shape, rows), dtype, files.file_of(name), name)
    return cast


def rounded(tensor: Tensor, dtype: torch.dtype, file: Path, name: str) -> Tensor:
    """Errors: CheckpointError, naming file and tensor, where a number is too large for the dtype."""
    found = tensor.to(dtype)
    if num_infinite(found) != num_infinite(tensor):
        largest = float(tensor[tensor.isfinite()].abs().max())
        raise CheckpointError(
            f"{file}: {name} holds {largest:g}, too large for {dtype}, whose largest number is "
            f"{torch.finfo(dtype).max:g}"
        )
    return found


def num_infinite(tensor: Tensor) -> int:
    return int(torch.isinf(tensor).sum())
