"""Safetensors whose matrices are fp8 with a scale a block, as DeepSeek-V3 is published, read as bfloat16.

    NAME             (rows, columns) F8_E4M3
    NAME_scale_inv   (rows / 128, columns / 128, rounded up) F32: what the block's numbers are multiplied by

weight = fp8 x scale, in float32, rounded to bfloat16 once, as the published conversion does it.
"""

from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats.file_bytes import Shape
from hybridflow.formats.safetensors_files import ALL, HeaderEntry, SafetensorsDirectory, TensorInfo, box_of, read_part

BLOCK = 128  # rows, and columns
SCALE = "_scale_inv"
READ_AS_BFLOAT16 = f"fp8 weights with a scale for each {BLOCK} x {BLOCK} block are read as bfloat16"
FP8, WIDE = torch.float8_e4m3fn, torch.bfloat16


class BlockFp8Directory(SafetensorsDirectory):
    """`tensors` has the matrices as bfloat16, and not their scales.

    Errors: CheckpointError, also for a matrix without scales and for scales of another shape.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._narrow: dict[str, tuple[HeaderEntry, HeaderEntry]] = {}
        for name, entry in list(self._entries.items()):
            if entry.info.dtype == FP8:
                self._narrow[name] = entry, self._scales_of(name, entry)
        for name, (entry, _) in self._narrow.items():
            del self._entries[name + SCALE]
            self._entries[name] = entry._replace(info=TensorInfo(entry.info.shape, WIDE))
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def read(self, name: str, shape: Shape, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        """As in the base class."""
        if name not in self._narrow:
            return super().read(name, shape, rows, columns)
        entry, scales = self._narrow[name]
        if entry.info.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: {name} has shape {entry.info.shape}, config.json asks for {tuple(shape)}"
            )
        offset, size = box_of(shape, rows, columns)
        blocks = [slice(first // BLOCK, ceil((first + n) / BLOCK)) for first, n in zip(offset, size, strict=True)]
        scale = read_part(scales, *box_of(scales.info.shape, *blocks))
        for dim, (first, n) in enumerate(zip(offset, size, strict=True)):
            numbers = torch.arange(first, first + n) // BLOCK - first // BLOCK
            scale = scale.index_select(dim, numbers)
        return read_part(entry, offset, size).float().mul_(scale).to(WIDE)

    def _scales_of(self, name: str, entry: HeaderEntry) -> HeaderEntry:
        scales = self._entries.get(name + SCALE)
        if scales is None:
            raise CheckpointError(f"{entry.file}: {name} is fp8, and no tensor {name + SCALE} is there")
        expected = tuple(ceil(n / BLOCK) for n in entry.info.shape)
        if len(expected) != 2 or scales.info != TensorInfo(expected, torch.float32):
            raise CheckpointError(
                f"{scales.file}: {name + SCALE} is {scales.info.dtype} of shape {scales.info.shape}, must be "
                f"float32 of shape {expected}: a scale for each {BLOCK} x {BLOCK} block of {name}"
            )
        return scales
