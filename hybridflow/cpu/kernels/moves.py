"""Blocks of weights that take one another's places: `moves.c`, called."""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import library, run

Move = tuple[int, int]  # to block, from block


class Moves(ctypes.Structure):
    """That of moves.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("stacks", "moves", "scratch", "next", "threads")),
        *((name, ctypes.c_int64) for name in ("stacks_count", "count", "aside", "block_bytes", "stretch")),
    ]


def move_blocks(stacks: Sequence[Tensor], moves: tuple[Move, ...], stretch: int) -> int:
    """Copy blocks in the order of `moves`, in each of `stacks`; the bytes of scratch it took.

    stacks: (blocks, ...) of one shape and dtype, each contiguous. Block number `blocks` is the scratch: `stretch` bytes
    of each block are moved at a time, so that it holds no more.
    """
    kernels = library()
    assert kernels is not None, "asked before"
    assert all(x.is_cpu and x.is_contiguous() and x.shape == stacks[0].shape for x in stacks), (
        "as the kernel reads them"
    )
    block_bytes = stacks[0][0].nbytes
    stretch = min(stretch, block_bytes)
    if not stretch or not moves:
        return 0
    pieces = len(stacks) * -(-block_bytes // stretch)
    scratch = torch.empty(min(torch.get_num_threads(), pieces) * stretch, dtype=torch.uint8)
    addresses = (ctypes.c_void_p * len(stacks))(*(x.data_ptr() for x in stacks))
    begun = ctypes.c_int64(0)
    arguments = Moves(
        stacks=ctypes.addressof(addresses),
        moves=ctypes.addressof(_numbers(moves)),
        scratch=scratch.data_ptr(),
        threads=ctypes.addressof(begun),
        stacks_count=len(stacks),
        count=len(moves),
        aside=len(stacks[0]),
        block_bytes=block_bytes,
        stretch=stretch,
    )
    run(kernels.hybridflow_move_blocks, arguments, pieces)
    return scratch.nbytes


@functools.lru_cache(maxsize=1 << 6)  # layers are alike
def _numbers(moves: tuple[Move, ...]) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * (2 * len(moves)))(*(number for move in moves for number in move))
