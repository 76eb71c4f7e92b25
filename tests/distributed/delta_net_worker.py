"""On two ranks: the first gradients of a Qwen3.5 as they are, and with what must be wrong, as whole tensors.

torchrun --nproc-per-node 2 -m tests.distributed.delta_net_worker CHECKPOINT OUT

no sum: the gradients of norms that heads share are not summed over the tensor-parallel ranks. leak: the layers with a
state do not know where sequences begin.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.models import layers
from hybridflow.models.attention import PackedSequences
from hybridflow.models.delta_rule import NO_PARENT, Sequences
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from tests.distributed.cases import ALGORITHM, BUDGETS, SGD, Case, make_rollout
from tests.distributed.given import given_roles
from tests.distributed.parity_worker import BUCKET_BYTES, experiment, one_iteration

CASES = {"tp": Case(tp=2), "sp": Case(tp=2, sequence_parallel=True)}
VARIANTS = ("right", "no sum", "leak")


def main(models: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    results: dict[str, Tensor] = {}
    for name, case in CASES.items():
        for variant in VARIANTS:
            with changed(variant):
                config = experiment(ALGORITHM, case, models, SGD, BUDGETS[0])
                roles = given_roles(config, world)
                results |= one_iteration(config, make_rollout(), roles, world, f"{name}/{variant}")[1]
    if platform.rank == 0:
        torch.save(results, out)
    platforms.stop()


@contextlib.contextmanager
def changed(variant: str) -> Iterator[None]:
    if variant == "no sum":
        with mock.patch.object(layers, "copy_to_tensor_model_parallel_region", lambda x, group: x):
            yield
    elif variant == "leak":
        with mock.patch.object(PackedSequences, "sequences", property(one_sequence)):
            yield
    else:
        yield


def one_sequence(packed: Any) -> Sequences:
    return Sequences((sum(packed.lengths),), (NO_PARENT,))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
