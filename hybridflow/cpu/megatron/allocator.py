"""Memory that tensors free is used again, instead of going back to the system and being faulted in anew.

Every operation of a step allocates a result; fresh memory costs page faults first.
"""

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Of this process, from now on, where the C library is glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)  # the most it takes; larger tensors are mapped one by one
        libc.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
        libc.mallopt(TOP_PAD, 64 << 20)
