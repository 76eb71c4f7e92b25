"""Each algorithm's iteration on the CPU; beside it each micro-batch of it on a device for which the host must not wait.

python -m tests.roles.host_waits_worker MODELS OUT
"""

import contextlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

from hybridflow.flows.deferred_log_probs import DeferredLogProbs
from hybridflow.flows.models import Roles
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import vocab_triton
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.platform import Platform
from hybridflow.placement.placed import place
from hybridflow.roles.base import Role, RunContext, TrainedRole
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, TrainedRewardModel
from hybridflow.trainers.fixed_data import build_models
from tests.distributed import algorithm_cases, algorithms_worker, fixed_cases, fixed_worker
from tests.distributed.cases import Case
from tests.distributed.given import given_roles
from tests.distributed.parity_worker import BUCKET_BYTES
from tests.roles.host_waits import DEVICE, HostWait, NoHostWaits, NotLaunched, built_for_the_device

ONE, BUDGET = Case(), 64
ONLINE = {name: (compared.section, compared.by_length) for name, compared in algorithm_cases.ALGORITHMS.items()}
ONLINE["dual_clip"] = (algorithm_cases.grpo(kind="dual_clip", entropy_coef=0.01), False)
METHODS = {  # of each class of roles: what computes micro-batches
    Actor: ("log_probs", "update"),
    Reference: ("log_probs",),
    Critic: ("values", "update"),
    TrainedRewardModel: ("scores", "step"),
}
# what ranks exchange on the device is nothing, too; of one collective torch has no such version
EXCHANGES = torch.library.Library("c10d", "IMPL")
EXCHANGES.impl("allreduce_coalesced_", lambda *args: FakeWork().boxed(), "Meta")


def main(models: Path, out: Path) -> None:
    vocab_triton.sums_kernel = vocab_triton.gradients_kernel = NotLaunched()  # nothing in this process computes by them
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    beside = RunContext(
        Platform(DEVICE, 0, 0, 1), world.groups, Exchange(dist.group.WORLD, DEVICE), BUCKET_BYTES, overlap=False
    )
    found = {}
    for name, (section, by_length) in ONLINE.items():
        config = algorithms_worker.experiment(section, ONE, models, BUDGET, by_length=by_length)
        rollout = algorithm_cases.make_uneven_rollout() if by_length else algorithm_cases.make_rollout()
        roles, twins = given_roles(config, world), on_the_device(given_roles, in_bfloat16(config), beside)
        with computed_beside(roles, twins) as seen:
            algorithms_worker.one_iteration(config, rollout, roles, world)
        found[name] = seen
    for name, trained in fixed_cases.ALGORITHMS.items():
        config = fixed_worker.experiment(trained, ONE, models, BUDGET)
        roles = build_models(place(config, 1), world)
        twins = on_the_device(lambda c, w: build_models(place(c, 1), w), in_bfloat16(config), beside)
        with computed_beside(roles, twins) as seen:
            fixed_worker.one_iteration(config, roles, world)
        found[name] = seen
    out.write_text(json.dumps(found))
    platforms.stop()


def in_bfloat16(config: Any) -> Any:
    changes = {}
    for name in ("actor", "critic", "reference", "reward_model"):
        role = getattr(config, name, None)
        if role is not None:
            changes[name] = role.model_copy(update={"dtype": "bfloat16"})
    return config.model_copy(update=changes)


def on_the_device(make: Callable[[Any, RunContext], Roles], config: Any, world: RunContext) -> Roles:
    with built_for_the_device():
        return make(config, world)


@contextlib.contextmanager
def computed_beside(roles: Roles, twins: Roles) -> Iterator[dict[str, Any]]:
    """Within the block a twin is asked what a role is asked: which calls, how many operations, and where one waits."""
    seen: dict[str, Any] = {"calls": Counter(), "operations": 0, "waits": []}
    pairs = [(getattr(roles, x), getattr(twins, x)) for x in ("actor", "critic", "reference", "reward_model")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DeferredLogProbs, "filled", _filled))
        for role, twin in pairs:
            for method in METHODS.get(type(role), ()):
                stack.enter_context(mock.patch.object(role, method, _both(role, twin, method, seen)))
        yield seen


def _filled(deferred: DeferredLogProbs, *args: Any) -> Any:
    """What the twin's step computed is no old log-prob."""
    deferred._computed[:] = [each for each in deferred._computed if each[1].device != DEVICE]
    return FILLED(deferred, *args)


FILLED = DeferredLogProbs.filled


def _both(role: Role, twin: Role, method: str, seen: dict[str, Any]) -> Callable[..., Any]:
    own, other = getattr(role, method), getattr(twin, method)

    def both(*args: Any) -> Any:
        seen["calls"][f"{type(role).__name__}.{method}"] += 1
        with contextlib.ExitStack() as stack:
            for computing in ("_results", "_accumulate"):  # micro-batches; what follows is once a mini-batch
                if hasattr(twin, computing):
                    stack.enter_context(mock.patch.object(twin, computing, _watched(twin, computing, seen)))
            if isinstance(twin, TrainedRole):
                stack.enter_context(mock.patch.object(twin.training_model, "step", lambda lr: 0.0))
            try:
                other(*args)
            except HostWait as wait:
                where = [x for x in traceback.extract_tb(wait.__traceback__) if "/hybridflow/" in x.filename]
                seen["waits"].append(f"{wait} at {Path(where[-1].filename).name}: {where[-1].line}")
        return own(*args)

    return both


def _watched(twin: Role, method: str, seen: dict[str, Any]) -> Callable[..., Tensor]:
    computing = getattr(twin, method)

    def watched(*args: Any, **kwargs: Any) -> Any:
        mode = NoHostWaits()
        try:
            with mode:
                return computing(*args, **kwargs)
        finally:
            seen["operations"] += mode.operations

    return watched


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
