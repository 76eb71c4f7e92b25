"""What a thing keeps of memory, by Python's own count, in which numpy's arrays are."""

import tracemalloc
from collections.abc import Callable
from typing import Any


def held_bytes(make: Callable[[], Any]) -> int:
    """What is still held after `make` has returned, by what it has returned."""
    make()  # imports and caches
    tracemalloc.start()
    try:
        made = make()
        held = tracemalloc.get_traced_memory()[0]
        del made
        return held - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
