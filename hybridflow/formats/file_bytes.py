"""Bytes of checkpoint files, read into memory of their own; every failure is a CheckpointError that names the file."""

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.formats.git_lfs import NOT_FETCHED, is_pointer

Shape = tuple[int, ...]

PIECE_BYTES = 32 << 20  # of a buffer for bytes that cannot be read into the tensor directly
LONG_RUN_BYTES = 64 << 10  # from here on a run of bytes is worth one system call


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """A descriptor of a regular file."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{file}: is no file")
        if is_pointer(os.pread(fd, 64, 0)):
            raise CheckpointError(f"{file}: {NOT_FETCHED}")
        yield fd
    finally:
        os.close(fd)


def file_size(fd: int) -> int:
    return os.fstat(fd).st_size


def read_bytes(fd: int, file: Path, start: int, length: int) -> bytes:
    buffer = bytearray(length)
    _read_into(fd, file, start, memoryview(buffer))
    return bytes(buffer)


def _read_into(fd: int, file: Path, start: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], start + done)
        except (OSError, OverflowError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        if count == 0:
            raise CheckpointError(f"{file}: is damaged or cut short: no byte {start + done}")
        done += count


def read_box(fd: int, file: Path, start: int, whole: Shape, offset: Shape, out: Tensor) -> None:
    """Fill `out`, which may be a view with strides, with the box at `offset` of a tensor of shape `whole`.

    The tensor lies in the file from byte `start` on, in row-major order. What is contiguous in the file and in `out` is
    read directly, the rest through a buffer of at most PIECE_BYTES.
    """
    if out.numel() == 0:
        return
    strides = _strides(whole)
    span = 1 + sum((n - 1) * stride for n, stride in zip(out.shape, strides, strict=True))  # first to last element
    first = start + out.itemsize * sum(o * stride for o, stride in zip(offset, strides, strict=True))
    if span == out.numel() and out.is_contiguous():
        _read_into(fd, file, first, memory_of(out))
    elif span * out.itemsize <= PIECE_BYTES:
        buffer = torch.empty(span, dtype=out.dtype)
        _read_into(fd, file, first, memory_of(buffer))
        out.copy_(buffer.as_strided(out.shape, strides))
    else:
        dim = next(i for i, n in enumerate(out.shape) if n > 1)
        rows = _rows_at_once(out.shape[dim + 1 :].numel(), strides[dim], out.itemsize)
        for row in range(0, out.shape[dim], rows):
            inner = (*offset[:dim], offset[dim] + row, *offset[dim + 1 :])
            read_box(fd, file, start, whole, inner, out=out.narrow(dim, row, min(rows, out.shape[dim] - row)))


def _rows_at_once(wanted: int, stride: int, itemsize: int) -> int:
    """How many rows go through one buffer: one where few of a row's elements are wanted, but many in number."""
    if wanted < stride and wanted * itemsize >= LONG_RUN_BYTES:
        return 1
    return max(PIECE_BYTES // (stride * itemsize), 1)


def _strides(shape: Shape) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return strides


def start_writing(fd: int, start: int, stop: int) -> None:
    """Have the system begin to bring written bytes to the disk, so that little is left for the sync at the end."""
    os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which live as long as the view.

    numpy would do the same, but a storage that numpy has seen never changes size again. The reshard empties the
    storages of weights that a checkpoint reads and writes.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{tuple(tensor.shape)} on {tensor.device}"
    found = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    found.tensor = tensor  # type: ignore[attr-defined]  # keeps the memory
    return memoryview(found).cast("B")
