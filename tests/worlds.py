"""Process groups of tests that start no ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def world_of_one() -> Iterator[dist.ProcessGroup]:
    """On gloo, unless another test file has left one."""
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_world_size() == 1
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if started:
        dist.destroy_process_group()
