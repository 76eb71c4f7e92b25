"""The processes that share a conversion: one, or those that torchrun started.

No process waits for another that has failed: the first to fail says why, leaves, and torchrun ends the others.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridflow.errors import UserError
from hybridflow.parallel.platform import first_to_fail

Show = Callable[[Exception], None]  # a user's error, to the user


def _print(error: Exception) -> None:
    print(error, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Processes:
    """This process among those of the conversion; `group` is None where torchrun did not start it."""

    rank: int = 0
    count: int = 1
    group: ProcessGroup | None = None
    show: Show = _print

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(group=self.group)

    def gather(self, lines: list[str]) -> list[str]:
        """The lines of all processes, on each of them."""
        if self.group is None:
            return lines
        every: list[list[str]] = [[] for _ in range(self.count)]
        dist.all_gather_object(every, lines, group=self.group)
        return [line for some in every for line in some]

    def tell_first(self, error: BaseException) -> None:
        """Report an error before what others still need is removed; others stay silent, as does this process later."""
        if self.group is not None and isinstance(error, Exception):
            report(error, self.show)


ALONE = Processes()


def join(show: Show) -> Processes:
    """Meet the other processes, where torchrun started this one."""
    if not dist.is_torchelastic_launched():
        return ALONE
    dist.init_process_group("gloo")
    return Processes(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, show)


def abandon(status: int) -> None:
    """End this process at once where others may be waiting for it, and it for them."""
    if dist.is_torchelastic_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def report(error: Exception, show: Show) -> None:
    """Show an error, if no other process has reported one: those that fail because a peer left stay silent."""
    if not first_to_fail():
        return
    if isinstance(error, UserError | OSError):
        show(error)
    else:
        traceback.print_exception(error)
