"""Zeros in the memory of a CPU without a pass over it. `parallel.platform` opens this door.

Whole pages are exchanged for fresh ones, which the kernel hands out as zeros when they are first touched: what is never
touched costs neither time nor memory.
"""

import ctypes
import mmap
import sys

from torch import Tensor

MADV_DONTNEED = 4  # linux/mman.h; Python's mmap names it for Python's mappings alone


def zero(memory: Tensor) -> None:
    """memory: contiguous uint8, of torch's allocator."""
    head = -memory.data_ptr() % mmap.PAGESIZE
    tail = max(len(memory) - head, 0) % mmap.PAGESIZE
    exchanged = _exchange_pages(memory.data_ptr() + head, len(memory) - head - tail)
    for part in (memory[:head], memory[len(memory) - tail :]) if exchanged else (memory,):
        part.zero_()


def _exchange_pages(start: int, size: int) -> bool:
    """Whether these whole pages could be given back to the kernel. There they stand, as before, but empty.

    Of memory that is private and anonymous, as that of torch's allocator is, the next reading gives zeros: madvise(2).
    """
    if sys.platform != "linux" or size <= 0:
        return False
    advised = ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_DONTNEED)
    return bool(advised == 0)  # not so for locked pages
