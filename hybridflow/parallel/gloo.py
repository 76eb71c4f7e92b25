"""gloo's process groups with one thread each.

torch 2.13 gives a group two, and both write into its status, without a lock, the name of the collective that they have
ended. A name of over 15 characters is on the heap, and freed twice where two such collectives end at once: two ranks
that had six gathers of ZeRO-1 under way, as megatron coalesces them, died within 2,000 rounds of them, or 20,000.
With one thread a group's collectives run in the order of their calls.
"""

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store

_Gloo: Any = ProcessGroupGloo  # torch's stub has other names than torch
_init = _Gloo.__init__


def use_one_thread() -> None:
    """In every group that is made in this process from now on."""
    _Gloo.__init__ = _with_one_thread


def _with_one_thread(group: Any, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    options = _Gloo._Options()
    options._devices = [_Gloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    _init(group, store, rank, size, options)
