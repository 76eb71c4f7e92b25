"""Save an actor in one layout, load and save it in another: what differs between the two checkpoints, in every element;
and what the same next step makes of both.

torchrun --nproc-per-node 4 -m tests.checkpoint.layouts_worker CHECKPOINTS OUT
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.checkpoint import resume
from hybridflow.checkpoint.resume import ResumeSource, restore
from hybridflow.checkpoint.state import RunState, SavedRun, load_state
from hybridflow.checkpoint.store import step_name
from hybridflow.checkpoint.writer import CheckpointWriter
from hybridflow.config import CheckpointConfig
from hybridflow.config.losses import KL, PolicyLoss
from hybridflow.formats.distributed_directory import DistributedDirectory
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import KLTerm, policy_loss
from hybridflow.roles.policy import Actor
from tests.checkpoint.layouts import CASES, Case, experiment
from tests.distributed.train_batch import make_train_batch

BUCKET_BYTES = 1 << 14  # several storages a model: shares of ZeRO-1 begin and end within rows
NUM_STEPS = 3


def main(checkpoints: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    store, found = platforms.fresh_store(), {}
    for case in CASES:
        first, again = out / case.name / "first", out / case.name / "again"
        actor = actor_of(checkpoints / case.model, case.source, case, world)
        for _ in range(NUM_STEPS):
            train(actor)
        save(actor, first, 1, store, platform)
        other = actor_of(checkpoints / case.model, case.target, case, world)
        step = first / step_name(1)
        with counted_reads() as reads:
            restore(ResumeSource(step, load_state(step), False, None, ()), [other], dist.group.WORLD)
        all_reads: list[Any] = [None] * platform.world_size
        dist.all_gather_object(all_reads, reads)
        steps = other.training_model.num_steps() if other.training_model else None
        save(other, again, 1, store, platform)
        for role in (actor, other):
            train(role)
        save(actor, first, 2, store, platform)
        save(other, again, 2, store, platform)
        if platform.rank == 0:
            found[case.name] = {
                "num_steps": steps,
                "metadata was read": [[str(path.relative_to(out)) for path in reads] for reads in all_reads],
                "after loading": differences(first / step_name(1), again / step_name(1)),
                "after a step": differences(first / step_name(2), again / step_name(2)),
                "moved": differences(first / step_name(1), first / step_name(2)),
            }
    if platform.rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    platforms.stop()


@contextmanager
def counted_reads() -> Iterator[list[Path]]:
    """The directories whose metadata this rank reads."""
    reads: list[Path] = []
    before = resume.DistributedDirectory

    def counted(path: Path) -> DistributedDirectory:
        reads.append(path)
        return before(path)

    resume.DistributedDirectory = counted  # type: ignore[assignment, misc]
    try:
        yield reads
    finally:
        resume.DistributedDirectory = before  # type: ignore[misc]


def actor_of(models: Path, layout: dict[str, Any], case: Case, world: RunContext) -> Actor:
    placed = place(experiment(models, layout, case), world.platform.world_size)
    return Actor(placed.actor, temperature=1.0, world=world)


def train(actor: Actor) -> None:
    actor.begin_iteration(1, 1)
    loss = PolicyLoss(clip_range=1e6)  # a token that rounding takes over the edge of the clip has a gradient or none
    actor.update(make_train_batch(), policy_loss(loss, KLTerm(KL(use="none"), 0.0)))


def save(actor: Actor, root: Path, iteration: int, store: dist.Store, platform: platforms.Platform) -> None:
    own = dist.PrefixStore(f"{root} {iteration}", store)
    saver = CheckpointWriter(
        [actor], root, CheckpointConfig(), config_yaml="", platform=platform, group=dist.group.WORLD, store=own
    )
    saver.save(SavedRun(RunState(iteration=iteration), {}, {}, {}, None))


def differences(a: Path, b: Path) -> dict[str, float]:
    """The largest of each tensor, relative to its largest element; -1 where only one has it."""
    first, second = DistributedDirectory(a / "actor"), DistributedDirectory(b / "actor")
    found = {}
    for key in sorted({*first.tensors, *second.tensors}):
        if key not in first or key not in second:
            found[key] = -1.0
            continue
        shape = first.tensors[key].shape
        x, y = (files.read(key, (0,) * len(shape), shape).double() for files in (first, second))
        found[key] = 0.0 if torch.equal(x, y) else float((x - y).abs().max() / x.abs().max())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
