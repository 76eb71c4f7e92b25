"""A group of some ranks beside the world's: made by these alone, with a separate time-out.

`torch.distributed.new_group` is collective over the world and needs one: where a single host is out of reach, nobody
gets a group. What looks for the host or the link that is out of reach needs groups that fail by themselves.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from hybridflow.parallel.device import CPU

TAG = 0


class StandaloneGroup:
    """`size` ranks that have the same `name`. Calls return when they are done, or raise RuntimeError in time.

    The constructor raises in time where a rank does not come. Where a rank has come and its host is cut off before
    all are connected, gloo of torch 2.13 waits for minutes: make the group in a thread that can be given up.

    Tensors on the CPU travel by gloo; on CUDA those of `device` by NCCL, which was written from documentation and never
    run.
    """

    def __init__(
        self, store: Store, name: str, *, rank: int, size: int, timeout: timedelta, device: torch.device = CPU
    ) -> None:
        self.rank, self.size, self.device, self._timeout = rank, size, device, timeout
        connection: Store = store.clone()  # type: ignore[attr-defined]  # torch has it, the stub not
        own = PrefixStore(f"group/{name}", connection)  # who waits there holds up nobody who asks `store`
        own.set_timeout(timeout)
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", own), rank, size, timeout)
        self._nccl: Any = None if device.type == "cpu" else _nccl(PrefixStore("nccl", own), rank, size, timeout)

    def send(self, tensor: Tensor, to: int) -> None:
        self._of(tensor).send([tensor], to, TAG).wait(self._timeout)
        self._synchronize(tensor)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._of(tensor).recv([tensor], source, TAG).wait(self._timeout)
        self._synchronize(tensor)

    def all_reduce(self, tensor: Tensor) -> None:
        self._of(tensor).allreduce([tensor]).wait(self._timeout)
        self._synchronize(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0."""
        self._of(tensor).broadcast(tensor, 0).wait(self._timeout)
        self._synchronize(tensor)

    def _of(self, tensor: Tensor) -> Any:
        return self._gloo if tensor.device.type == "cpu" else self._nccl

    def _synchronize(self, tensor: Tensor) -> None:
        """NCCL's wait is for the stream, and clocks measure the host."""
        if tensor.device.type != "cpu":
            torch.cuda.synchronize(tensor.device)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
