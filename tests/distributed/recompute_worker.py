"""On every rank: a loss, its gradients and what layers keep, with each module computed again, beside none.

torchrun --nproc-per-node N -m tests.distributed.recompute_worker CHECKPOINTS OUT NAME ...
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config import ExperimentConfig
from hybridflow.config.recompute import Recompute, shown
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import negative_log_likelihood
from hybridflow.roles.policy import Actor
from tests.distributed.cases import GROUPS, SGD, make_groups
from tests.distributed.parity_worker import BUCKET_BYTES, experiment
from tests.distributed.recompute_cases import BUDGET, RUNS, Again, values
from tests.placement.kept import HeldStorages


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for run in [run for run in RUNS if run.name in names]:
        found = compared(run, checkpoints / run.family, world)
        everyone: list[Any] = [None] * platform.world_size
        dist.all_gather_object(everyone, found)
        if platform.rank == 0:
            (out / f"{run.name}.json").write_text(json.dumps(everyone))
    platforms.stop()


def compared(run: Again, models: Path, world: RunContext) -> dict[str, dict[str, Any]]:
    """By value of `recompute`: whether all is the same to the bit, the largest difference, and bytes."""
    spec = place(config_of(run, models, "none"), world.platform.world_size).actor.spec
    loss, gradients, held = once(run, models, "none", world)
    found = {"none": held | {"largest": float(gradients.abs().max())}}
    for recompute in values(spec):
        other, others, kept = once(run, models, recompute, world)
        difference = float((others - gradients).abs().max())
        same = bool((other == loss).all())
        found[shown(recompute)] = kept | {"difference": difference, "same_loss": same}
    return found


def config_of(run: Again, models: Path, recompute: Recompute) -> ExperimentConfig:
    tree = experiment(GROUPS, run.case, models, SGD, BUDGET).model_dump()
    tree["actor"]["recompute"] = recompute
    if run.adapters:
        tree["actor"]["lora"], tree["reference"] = {"rank": 4}, None
    return ExperimentConfig.model_validate(tree)


def once(run: Again, models: Path, recompute: Recompute, world: RunContext) -> tuple[Tensor, Tensor, dict[str, int]]:
    """The loss, this rank's gradients of all micro-batches, and what is held of the first one before it goes back."""
    config = config_of(run, models, recompute)
    placed = place(config, world.platform.world_size).actor
    actor = Actor(placed, temperature=config.sampling.temperatures, world=world)
    parameters = [(name, x) for chunk in actor.chunks for name, x in chunk.named_parameters() if x.requires_grad]
    generator = torch.Generator().manual_seed(3)
    for name, x in parameters:
        if "lora_b" in name:
            x.data.copy_(torch.randn(x.shape, generator=generator) / 10)
    actor.training_model.zero_gradients()
    with held_by_layers(actor) as found:
        loss = actor.accumulate(make_groups(), negative_log_likelihood())
    return torch.as_tensor(loss), torch.cat([x.main_grad.flatten() for _, x in parameters]).clone(), found


@contextmanager
def held_by_layers(actor: Actor) -> Iterator[dict[str, int]]:
    """bytes, tokens: of the first micro-batch, when the last layer here has run."""
    layers = [layer for chunk in actor.chunks for layer in chunk.module.decoder.layers]
    held = HeldStorages(x for chunk in actor.chunks for x in chunk.parameters())
    found: dict[str, int] = {}

    def begin(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        held.__enter__()

    def end(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        held.__exit__(None, None, None)
        if layer is layers[-1] and not found:
            found.update(bytes=held.num_bytes(), tokens=sum(kwargs["packed_seq_params"].lengths))

    handles = [layer.register_forward_pre_hook(begin, with_kwargs=True, prepend=True) for layer in layers]
    handles += [layer.register_forward_hook(end, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
