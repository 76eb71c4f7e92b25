"""How a process of TRL ends."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """At once, when all have done their work: gloo's threads are still there, and now and then the interpreter aborts
    over them when it takes its objects down, which would be taken for a failure of the program."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
