"""What a layer, a micro-batch and an optimizer step take whatever their sizes, and the rate of what is elementwise.

Of the trainer's own roles on the first rank: models of few and of many narrow layers, and one that is wide enough for
its elementwise operations to count.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridflow.automap.cost import Device
from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.mean_rows import MeanRows
from hybridflow.automap.profiling.tiny import PROMPT, batch, make_model, placed_run
from hybridflow.automap.role_time import forward_cost, gradient_cost, model_of
from hybridflow.placement.placed import PlacedRun
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import negative_log_likelihood
from hybridflow.roles.policy import Actor

NARROW, FEW, MANY = 32, 2, 10  # hidden size and layers
REPEATS = 7
ENDLESS = 1e30  # bytes/s
LEAST_SHARE = 0.02  # of a pass, that is elementwise whatever the measured products leave of it
WIDE = {"cpu": (384, 3, 16, 88), "cuda": (4096, 3, 16, 2040)}  # hidden size, layers, rows, response


@dataclass(frozen=True)
class LayerOverheads:
    """Seconds."""

    layer_forward: float
    layer_backward: float
    micro_batch: float
    step: float
    step_layer: float


@dataclass(frozen=True)
class _Times:
    """Of a narrow model: a pass over one micro-batch, a step over one and over two."""

    forward: float
    step: float
    step_of_two: float


def layer_overheads(directory: Path, world: RunContext) -> LayerOverheads:
    """Collective over the world; the first rank alone works, and it alone knows the result."""
    few, many = (_narrow(directory, layers, world) for layers in (FEW, MANY))
    between = MANY - FEW
    forward = (many.forward - few.forward) / between
    both = [times.step_of_two - times.step for times in (few, many)]  # one micro-batch forward and backward
    backward = (both[1] - both[0]) / between - forward
    rest = [times.step - each for times, each in zip((few, many), both, strict=True)]
    step_layer = max((rest[1] - rest[0]) / between, 0.0)
    return LayerOverheads(
        layer_forward=max(forward, 0.0),
        layer_backward=max(backward, 0.0),
        micro_batch=max(few.forward - FEW * forward, 0.0),
        step=max(rest[0] - FEW * step_layer, 0.0),
        step_layer=step_layer,
    )


def _narrow(directory: Path, layers: int, world: RunContext) -> _Times:
    model = directory / f"narrow_{layers}"
    if world.platform.rank == 0:
        make_model(model, hidden=NARROW, layers=layers, positions=64)
    actor = Actor(_run(model, world, length=16, budget=16).actor, temperature=1.0, world=world)
    if not actor.grid.inside:
        return _Times(0.0, 0.0, 0.0)
    one, two = batch(1, 8), batch(2, 8)
    return _Times(
        forward=_median(lambda: actor.log_probs(one), world),
        step=_median(lambda: actor.update(one, negative_log_likelihood()), world),
        step_of_two=_median(lambda: actor.update(two, negative_log_likelihood()), world),
    )


def elementwise_bandwidths(directory: Path, world: RunContext, profile: DeviceProfile) -> tuple[float, float]:
    """Bytes/s forward and backward: what of a wide model's time the profile's products, attention and overheads leave.

    Collective over the world, as `layer_overheads`.
    """
    hidden, layers, rows, response = WIDE[world.platform.device.type]
    model = directory / "wide"
    if world.platform.rank == 0:
        make_model(model, hidden=hidden, layers=layers, positions=PROMPT + response)
    tokens = rows * (PROMPT + response)
    run = _run(model, world, length=PROMPT + response, budget=tokens)
    actor = Actor(run.actor, temperature=1.0, world=world)
    if not actor.grid.inside:
        return 1.0, 1.0
    some, device = batch(rows, response), Device(without_elementwise(profile))
    config = run.config.actor
    role = actor.spec, actor.grid.layout, config, MeanRows(rows, PROMPT, response), device
    forward = _median(lambda: actor.log_probs(some), world)
    both = _median(lambda: actor.accumulate(some, negative_log_likelihood()), world)
    known = forward_cost(*role, head="lm").seconds
    known_both = gradient_cost(*role, head="lm").seconds
    model_of_role = model_of(actor.spec, actor.grid.layout, config, device, head="lm")
    num_bytes = layers * tokens * model_of_role.elementwise_bytes()
    return (
        num_bytes / max(forward - known, LEAST_SHARE * forward),
        2 * num_bytes / max(both - forward - (known_both - known), LEAST_SHARE * (both - forward)),
    )


def without_elementwise(profile: DeviceProfile) -> DeviceProfile:
    return profile.model_copy(update={"elementwise_bandwidth": ENDLESS, "elementwise_backward": ENDLESS})


def _run(model: Path, world: RunContext, *, length: int, budget: int) -> PlacedRun:
    """Of what the first rank has written by now."""
    world.exchange.sum(torch.zeros(1, device=world.platform.device))
    return placed_run(model, tp=1, dtype="float32", length=length, budget=budget, output_dir=model)


def _median(work: Callable[[], object], world: RunContext) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        work()
        world.platform.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
