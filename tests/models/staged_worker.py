"""Actors whose optimizer states lie in host memory, beside actors that hold them: what differs in any bit.

torchrun --nproc-per-node 4 -m tests.models.staged_worker CHECKPOINTS OUT CASE ...
"""

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from hybridflow.checkpoint.resume import ResumeSource, restore
from hybridflow.checkpoint.state import load_state
from hybridflow.checkpoint.store import step_name
from hybridflow.models import staged_step
from hybridflow.models.memory import storages
from hybridflow.parallel import host_memory
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.lanes import Lane, Lanes
from hybridflow.parallel.platform import Platform
from hybridflow.roles.base import RunContext
from hybridflow.roles.policy import Actor
from tests.checkpoint.layouts import LAYOUTS, Case
from tests.checkpoint.layouts_worker import BUCKET_BYTES, actor_of, differences, save, train

PART_BYTES = 1 << 14
ALWAYS = {"offload_optimizer": "always"}
OVERLAPS = "dp4, overlapped"  # replicas gather weights while they compute
PLACES = {"dp4": "qwen2", "tp2dp2": "qwen2", "pp2dp2": "qwen2", "tp2dp2ep4": "glm4_moe"}
CASES = {
    f"{place} {kind} {dtype}": Case(model, place, place, kind, dtype)
    for place, model in PLACES.items()
    for kind in ("adam", "adam whole", "momentum")
    for dtype in ("float32", "bfloat16")
}
CASES |= {
    OVERLAPS: Case("qwen2", "dp4", "dp4", dtype="bfloat16"),
    "adapters": Case("qwen2", "tp2dp2", "tp2dp2", dtype="bfloat16"),
    "steps in groups": Case("glm4_moe", "tp2dp2ep4", "tp2dp2ep4", dtype="bfloat16"),
}
MORE = {"adapters": {"lora": {"rank": 4}}}  # keys of the actor
STEPS = 3


class LateLanes(Lanes):
    """A lane does what it has to, in order, when something waits for it and not before: a GPU may take as long.

    hasty: the lane that takes no time, and waits for nothing but what it is told to wait for.
    """

    def __init__(self, hasty: Lane | None) -> None:
        super().__init__()
        self._hasty = hasty
        self._queues: dict[Lane, list[tuple[object, Any, list[Any]]]] = {"in": [], "compute": [], "out": []}

    def run(self, lane: Lane, work: Callable[[], object] | None = None, *, after: Iterable[Any] = ()) -> Any:
        mark, queue = object(), self._queues[lane]
        queue.append((mark, work, [*after]))

        def until_here() -> None:
            while any(mark is each for each, _, _ in queue):
                _, first, waits = queue.pop(0)
                for wait in waits:
                    wait()
                if first is not None:
                    first()

        if work is None or lane == self._hasty:  # what comes next on the current stream sees all that was waited for
            until_here()
        return until_here


class AdamOfGroups(torch.optim.Optimizer):
    """Adam as Transformer Engine has it: a group has the count of steps, and one without parameters counts none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, (one, two) = self.state[parameter], group["betas"]
                if not state:
                    state |= {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - one)
                square = state["exp_avg_sq"].mul_(two).addcmul_(parameter.grad, parameter.grad, value=1 - two)
                root = (square / (1 - two ** group["step"])).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(mean / (1 - one ** group["step"]), root, value=-group["lr"])


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    host_memory.PART_BYTES = PART_BYTES
    store, found = platforms.fresh_store(), {}
    for name in names:
        case = CASES[name]
        staged_step.new_lanes = partial(LateLanes, "out" if case.dtype == "float32" else None)
        with ExitStack() as stack:
            if name == "steps in groups":
                for module in (megatron_optimizer, distrib_optimizer):
                    stack.enter_context(mock.patch.object(module, "Adam", AdamOfGroups))
            overlap = name == OVERLAPS
            world = RunContext(
                platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES, overlap=overlap
            )
            make = partial(made, checkpoints, case, MORE.get(name, {}), world)
            found[name] = compared(make, out / name, store, platform)
            print(name, flush=True)
    everywhere: list[Any] = [None] * platform.world_size
    dist.all_gather_object(everywhere, found)
    if platform.rank == 0:
        out.with_suffix(".json").write_text(json.dumps({name: [each[name] for each in everywhere] for name in names}))
    platforms.stop()


def made(checkpoints: Path, case: Case, more: dict[str, Any], world: RunContext, keys: dict[str, Any]) -> Actor:
    return actor_of(checkpoints / case.model, {**LAYOUTS[case.source_name], **more, **keys}, case, world)


def compared(make: Callable[[dict], Actor], out: Path, store: dist.Store, platform: Platform) -> dict[str, Any]:
    """Steps of both, then saves of both, each resumed as the other and stepped on."""
    whole, staged = make({}), make(ALWAYS)
    before = state_of(whole)
    norms = [[*stepped(whole, STEPS)], [*stepped(staged, STEPS)]]
    after = state_of(staged)
    found = {
        "differs": differing(state_of(whole), after),
        "moved": len(differing(before, after)),
        "norms": norms,
        "num_steps": [actor.training_model.num_steps() for actor in (whole, staged)],
        "parts": len(staged.training_model._staged._parts),
        "bytes": [actor.training_model.memory_bytes()["optimizer"] for actor in (whole, staged)],
        "host": [actor.training_model.host_bytes() for actor in (whole, staged)],
    }
    with most_held(staged) as held:
        stepped_again = [*stepped(staged, 1)]
    found |= {"held": max(held), "norms again": [stepped_again, [*stepped(whole, 1)]]}
    found["not finite"] = differing(*unchanged_by_infinity(staged))
    for name, actor in (("whole", whole), ("staged", staged)):
        save(actor, out / name, 1, store, platform)
    found["saved"] = {}
    if platform.rank == 0:
        found["saved"] = differences(out / "whole" / step_name(1), out / "staged" / step_name(1))
    resumed = {"whole": make(ALWAYS), "staged": make({})}
    for name, actor in resumed.items():
        step = out / name / step_name(1)
        restore(ResumeSource(step, load_state(step), False, None, ()), [actor], dist.group.WORLD)
    for actor in (whole, staged, *resumed.values()):
        [*stepped(actor, 1)]
    right = state_of(whole)
    others = {"staged": staged, "whole, then staged": resumed["whole"], "staged, then whole": resumed["staged"]}
    found["resumed"] = {name: differing(right, state_of(actor)) for name, actor in others.items()}
    return found


def stepped(actor: Actor, count: int) -> Iterator[float]:
    """The norms."""
    for _ in range(count):
        train(actor)
        yield from (float(step.values[-1]) for step in actor.steps)


def state_of(actor: Actor) -> dict[str, Tensor]:
    """Weights, main weights and moments of this rank; of a state in parts, each tensor as one."""
    actor.wait_for_weights()
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    found = {f"{number}": parameter.detach().clone() for number, parameter in enumerate(parameters)}
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    for state in actor.training_model.owned_states():
        for name, tensor in state.tensors.items():
            key = f"{numbers[id(state.parameter)]} {name}"
            whole = found.setdefault(key, torch.full((state.parameter.numel(),), torch.nan))
            whole[state.start : state.stop] = tensor
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    keys = sorted({*one, *other})
    return [key for key in keys if key not in one or key not in other or not same(one[key], other[key])]


def same(one: Tensor, other: Tensor) -> bool:
    """NaN is the same as NaN: what another rank owns."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def unchanged_by_infinity(actor: Actor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    before, trained = state_of(actor), actor.training_model
    trained.zero_gradients()
    for gradients in trained._gradients():
        gradients.fill_(torch.inf)
    with mock.patch.object(trained._staged, "step", side_effect=AssertionError("nothing is fetched")):
        assert not torch.isfinite(torch.tensor(trained.step(1.0)))
    return before, state_of(actor)


@contextmanager
def most_held(actor: Actor) -> Iterator[list[int]]:
    """Bytes of tensors at each part of a step, beyond what is there before the first part."""
    staged, known, held = actor.training_model._staged, set[int](), []
    step, part = staged.step, staged._step

    def alive() -> dict[int, int]:
        own = storages(x for x in gc.get_objects() if isinstance(x, Tensor))
        return {storage.data_ptr(): storage.nbytes() for storage in own}

    def whole_step() -> None:
        known.update(alive())
        step()

    def one_part(*arguments: Any) -> None:
        part(*arguments)
        held.append(sum(size for pointer, size in alive().items() if pointer not in known))

    with mock.patch.object(staged, "step", whole_step), mock.patch.object(staged, "_step", one_part):
        yield held


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
