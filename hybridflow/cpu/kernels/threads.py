"""What the kernels take, and how they are called."""

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

DTYPES = (torch.float32, torch.bfloat16)


def fields(pointers: list[str], numbers: list[str], *scalars: str) -> list[tuple[str, type]]:
    """Of a struct as the C files have them: pointers, 64-bit integers, then floats."""
    return [
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int64) for name in numbers),
        *((name, ctypes.c_float) for name in scalars),
    ]


def run(kernel: Callable[..., int], arguments: ctypes.Structure, pieces: int) -> None:
    """Call the kernel by as many threads as torch has, at most one for each piece of the work."""
    taken = ctypes.c_int64(0)  # the next piece, which the threads count on
    arguments.next = ctypes.addressof(taken)
    call = functools.partial(kernel, ctypes.byref(arguments))
    count = min(torch.get_num_threads(), pieces)
    others = [_threads(os.getpid(), count - 1).submit(call) for _ in range(count - 1)] if count > 1 else []
    if any([call(), *(other.result() for other in others)]):
        raise MemoryError("a kernel on the CPU found no memory to compute in")


@functools.lru_cache(maxsize=1)
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """process: a fork has none of the parent's threads."""
    return ThreadPoolExecutor(count, "kernels")
