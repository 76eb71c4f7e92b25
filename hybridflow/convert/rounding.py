"""Tensors in another dtype: rounded once, and refused where a number is too large."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.convert.compare import CheckpointFiles, row_pieces
from hybridflow.errors import CheckpointError
from hybridflow.formats.safetensors_files import TensorInfo


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
