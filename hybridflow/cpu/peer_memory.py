"""The memory of another process of this host, read where it lies: process_vm_readv(2), for ranks on CPUs.

The reader copies once, as many pieces as it likes; a message is copied twice, and wakes threads on both sides. Linux
lets a process read those of the same user. Where Yama allows it to their ancestors alone (Ubuntu), each process names
the parent, torchrun's agent, whose descendants are trusted as well. What is not allowed is found by trying.
"""

import ctypes
import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PR_SET_PTRACER = 0x59616D61
MAX_RUNS, MAX_BYTES = 1024, 1 << 30  # of a call: IOV_MAX, and half of what Linux reads at most

_probe = ctypes.c_int64(secrets.randbits(62) + 1)


@dataclass(frozen=True)
class PeerRectangle:
    """A rectangle in another process: where it begins, bytes from row to row, and where it goes.

    target: (rows, columns) or (columns,), of neighbouring columns.
    """

    address: int
    row_bytes: int
    target: Tensor


def introduction() -> Tensor:
    """(4,) int64: of which host and of which processes there, which process, and where it has which number.

    Whoever is given this may try to read.
    """
    _trust_siblings()
    return torch.tensor([_host(), os.getpid(), ctypes.addressof(_probe), _probe.value])


def can_read(introduction: Tensor) -> bool:
    """Whether this process can read the memory of the one that introduced itself."""
    host, process, address, number = introduction.tolist()
    found = torch.zeros(1, dtype=torch.int64)
    if not host or host != _host():
        return False
    try:
        read(process, [PeerRectangle(address, found.nbytes, found)])
    except RuntimeError:
        return False
    return bool(found == number)


def read(process: int, pieces: Sequence[PeerRectangle]) -> None:
    """Copy all pieces out of the memory of `process`, which leaves it as it is meanwhile.

    Errors: RuntimeError, worded as that of a lost connection: the process or the process's memory is gone.
    """
    for piece in pieces:
        x = piece.target if piece.target.dim() == 2 else piece.target.unsqueeze(0)
        assert x.is_cpu and (x.shape[1] == 1 or x.stride(1) == 1), "a row's elements are neighbours"
        rows, width, stride = x.shape[0], x.shape[1] * x.element_size(), x.stride(0) * x.element_size()
        if rows * width == 0:
            continue
        if rows == 1 or stride == piece.row_bytes == width:
            for start in range(0, rows * width, MAX_BYTES):
                size = min(MAX_BYTES, rows * width - start)
                _read(process, _run(piece.address + start, 1, 0, size), _run(x.data_ptr() + start, 1, 0, size))
            continue
        at_once = max(1, min(MAX_RUNS, MAX_BYTES // width))
        for row in range(0, rows, at_once):
            count = min(at_once, rows - row)
            theirs = _run(piece.address + row * piece.row_bytes, count, piece.row_bytes, width)
            _read(process, theirs, _run(x.data_ptr() + row * stride, count, stride, width))


def _run(address: int, rows: int, stride: int, width: int) -> Tensor:
    """(runs, 2) int64, each a struct iovec: rows that touch each other are one run."""
    if rows == 1 or stride == width:
        return torch.tensor([[address, rows * width]])
    return torch.stack([torch.arange(address, address + rows * stride, stride), torch.full((rows,), width)], dim=1)


def _read(process: int, theirs: Tensor, ours: Tensor) -> None:
    """Of equal bytes in all, in whatever runs."""
    wanted = int(ours[:, 1].sum())
    count = _LIBC.process_vm_readv(process, ours.data_ptr(), len(ours), theirs.data_ptr(), len(theirs), 0)
    if count != wanted:
        why = os.strerror(ctypes.get_errno()) if count < 0 else f"{count} bytes of {wanted}"
        raise RuntimeError(f"connection closed: the memory of process {process} cannot be read ({why})")


def _host() -> int:
    """Of a machine's start and of a numbering of processes; 0: unknown."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        numbering = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(f"{started} {numbering}".encode()).digest()[:7]) + 1


def _trust_siblings() -> None:
    """Where Yama is; elsewhere the call fails, and nothing forbids."""
    _LIBC.prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
    ]
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


_LIBC = _libc()
