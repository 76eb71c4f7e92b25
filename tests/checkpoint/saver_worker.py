"""Saves of an actor of two replicas where something goes wrong: what each rank saw, as JSON.

torchrun --nproc-per-node 2 -m tests.checkpoint.saver_worker MODELS OUT

What fails is real: a limit on the size of a rank's files, a directory that is gone or stands in the way.
"""

import json
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.checkpoint import writer as module
from hybridflow.checkpoint.state import RunState, SavedRun
from hybridflow.checkpoint.store import read_manifest, step_name, steps
from hybridflow.checkpoint.writer import CheckpointWriter
from hybridflow.config import CheckpointConfig
from hybridflow.errors import SaveError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from hybridflow.roles.policy import Actor
from tests.checkpoint.layouts import Case, experiment, layout
from tests.checkpoint.layouts_worker import BUCKET_BYTES, train

SMALL = 20_000  # bytes, less than a rank's share of the actor


class Scene:
    """A run directory of its own, and what this rank is told there."""

    def __init__(self, name: str, out: Path, actor: Actor, platform: platforms.Platform, store: dist.Store) -> None:
        self.root, self.rank, self.actor = out / name / "checkpoints", platform.rank, actor
        self._platform, self._store, self._num_savers = platform, store, 0
        self.reports: list[str] = []

    def saver(self, **config: Any) -> CheckpointWriter:
        self._num_savers += 1
        return CheckpointWriter(
            [self.actor],
            self.root,
            CheckpointConfig(**config),
            config_yaml="",
            platform=self._platform,
            group=dist.group.WORLD,
            store=dist.PrefixStore(f"{self.root} {self._num_savers}", self._store),
            report=self.reports.append,
        )

    def steps(self) -> list[int]:
        dist.barrier()
        found = steps(self.root)
        dist.barrier()
        return found

    def sums(self, iteration: int) -> dict[str, Any]:
        """Of the files with tensors."""
        files = read_manifest(self.root / step_name(iteration)).files
        return {name: [its.size, its.crc32] for name, its in files.items() if name.endswith(".distcp")}

    def leftovers(self) -> list[str]:
        dist.barrier()
        found = sorted(path.name for path in self.root.glob(".*"))
        dist.barrier()
        return found


def state(iteration: int, score: float = 0.0) -> SavedRun:
    return SavedRun(RunState(iteration=iteration), {}, {}, {"reward/score_mean": score}, None)


def error_of(act: Callable[[], object]) -> str | None:
    try:
        act()
    except SaveError as error:
        return str(error)
    return None


@contextmanager
def small_files(here: bool) -> Iterator[None]:
    """No file of this process may be larger than SMALL: what is written beyond fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def after_preparing(act: Callable[[], object]) -> Iterator[None]:
    """Done on this rank once it knows what it has to write."""
    prepare = module.prepare_save

    def prepare_and_act(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        act()
        return prepared

    module.prepare_save = prepare_and_act
    try:
        yield
    finally:
        module.prepare_save = prepare


@contextmanager
def held() -> Iterator[threading.Event]:
    """Nothing is written before the event."""
    write, gate = module.write_records, threading.Event()

    def write_later(*arguments: Any) -> Any:
        assert gate.wait(60)
        return write(*arguments)

    module.write_records = write_later
    try:
        yield gate
    finally:
        module.write_records = write


# ------------------------------------------------------------------------------------------------ the scenes


def a_rank_fails(scene: Scene) -> dict[str, Any]:
    saver, found = scene.saver(), {}
    saver.save(state(1))
    with small_files(scene.rank == 1):
        found["error"] = error_of(lambda: saver.save(state(2)))
    found |= {"after": scene.steps(), "last": saver.last_iteration, "leftovers": scene.leftovers()}
    saver.save(state(2))
    return found | {"end": scene.steps(), "same": scene.sums(1) == scene.sums(2)}


def a_rank_fails_in_the_background(scene: Scene) -> dict[str, Any]:
    saver, found = scene.saver(async_save=True), {}
    saver.save(state(1))
    saver.wait()
    with small_files(scene.rank == 1):
        found["error at once"] = error_of(lambda: saver.save(state(2)))
        found["error"] = error_of(saver.wait)
    found |= {"after": scene.steps(), "last": saver.last_iteration, "leftovers": scene.leftovers()}
    saver.save(state(2))
    saver.wait()
    return found | {"end": scene.steps(), "same": scene.sums(1) == scene.sums(2)}


def the_run_goes_on(scene: Scene, *, async_save: bool) -> dict[str, Any]:
    saver, found = scene.saver(on_error="continue", async_save=async_save), {}
    with small_files(scene.rank == 1):
        saver.save(state(1))
        saver.wait()
    found |= {"after": scene.steps(), "failed": list(scene.reports)}
    scene.reports.clear()
    saver.save(state(2))
    saver.wait()
    return found | {"end": scene.steps(), "saved": list(scene.reports)}


def a_second_waits_for_the_first(scene: Scene) -> dict[str, Any]:
    saver = scene.saver(async_save=True)
    with held() as gate:
        saver.save(state(1))
        found: dict[str, Any] = {"while held": scene.steps()}
        saver.check()
        found["still"] = saver.last_iteration
        threading.Timer(0.5, gate.set).start()
        started = time.perf_counter()
        saver.save(state(2))
        found |= {"waited": time.perf_counter() - started, "last": saver.last_iteration}
        found["both"] = steps(scene.root)[:1]
    saver.wait()
    return found | {"end": scene.steps()}


def weights_change_meanwhile(scene: Scene) -> dict[str, Any]:
    scene.saver().save(state(1))
    saver = scene.saver(keep_last=9, async_save=True)
    for iteration in (2, 4):  # the copies are used again
        with held() as gate:
            saver.save(state(iteration))
            train(scene.actor)
            gate.set()
            saver.wait()
        scene.saver(keep_last=9).save(state(iteration + 1))
    return {str(iteration): scene.sums(iteration) for iteration in scene.steps()}


def no_room(scene: Scene) -> dict[str, Any]:
    saver, spare = scene.saver(), module.SPARE_BYTES
    saver.save(state(1))
    module.SPARE_BYTES = 1 << 60
    error = error_of(lambda: saver.save(state(2)))
    module.SPARE_BYTES = spare
    sizes = sum(size for size, _ in scene.sums(1).values())
    return {"error": error, "after": scene.steps(), "leftovers": scene.leftovers(), "sizes": sizes}


def the_directory_vanishes(scene: Scene) -> dict[str, Any]:
    saver = scene.saver()
    saver.save(state(1))
    with after_preparing(lambda: shutil.rmtree(scene.root) if scene.rank == 0 else None):
        error = error_of(lambda: saver.save(state(2)))
    saver.save(state(3))
    return {"error": error, "end": scene.steps()}


def copies_cannot_be_made(scene: Scene) -> dict[str, Any]:
    saver = scene.saver(async_save=True)
    if scene.rank == 1:
        saver._copies = [torch.empty(1)]
    error = error_of(lambda: saver.save(state(1)))
    return {"error": error, "after": scene.steps(), "leftovers": scene.leftovers()}


def a_later_one_is_damaged(scene: Scene) -> dict[str, Any]:
    """As after going on from 1, since 3 is damaged."""
    former = scene.saver(keep_last=9)
    former.save(state(1))
    former.save(state(3))
    if scene.rank == 0:
        os.truncate(scene.root / step_name(3) / "actor" / "__0_0.distcp", 10)
    saver = scene.saver(keep_last=1)
    saver.save(state(2))
    found: dict[str, Any] = {"after": scene.steps()}
    saver.save(state(3))
    return found | {"end": scene.steps()}


def an_old_one_stays(scene: Scene) -> dict[str, Any]:
    saver, in_the_way = scene.saver(keep_last=1), scene.root / ".step_000001.old" / "file"
    saver.save(state(1))
    with after_preparing(lambda: in_the_way.mkdir(parents=True) if scene.rank == 0 else None):
        error = error_of(lambda: saver.save(state(2)))
    found = {"error": error, "after": scene.steps(), "last": saver.last_iteration, "reports": list(scene.reports)}
    saver.save(state(3))
    return found | {"end": scene.steps(), "leftovers": scene.leftovers()}


def it_is_saved_again(scene: Scene) -> dict[str, Any]:
    """By a saver that does not know of it; one that does has nothing to do."""
    for score in (0.25, 0.75):
        saver = scene.saver(keep_last=1)
        saver.save(state(1, score))
    saver.save(state(1, 0.5))
    told = json.loads((scene.root / step_name(1) / "state.json").read_text())
    return {"end": scene.steps(), "score": told["metrics"]["reward/score_mean"]}


def a_million_iterations(scene: Scene) -> dict[str, Any]:
    saver = scene.saver(keep_last=1, async_save=True)
    for iteration in (999_999, 1_000_000, 1_000_001):
        saver.save(state(iteration))
    saver.wait()
    return {"end": scene.steps(), "names": sorted(path.name for path in scene.root.iterdir())}


def seconds_are_counted_once(scene: Scene) -> dict[str, Any]:
    found = {}
    for async_save in (False, True):
        saver, started = scene.saver(async_save=async_save), time.perf_counter()
        saver.save(state(1))
        saver.wait()
        found[f"async {async_save}"] = [saver.seconds, time.perf_counter() - started]
        dist.barrier()
    return found


SCENES: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "a rank fails": a_rank_fails,
    "a rank fails in the background": a_rank_fails_in_the_background,
    "the run goes on": lambda scene: the_run_goes_on(scene, async_save=False),
    "the run goes on, in the background": lambda scene: the_run_goes_on(scene, async_save=True),
    "a second waits for the first": a_second_waits_for_the_first,
    "weights change meanwhile": weights_change_meanwhile,
    "no room": no_room,
    "the directory vanishes": the_directory_vanishes,
    "copies cannot be made": copies_cannot_be_made,
    "a later one is damaged": a_later_one_is_damaged,
    "an old one stays": an_old_one_stays,
    "it is saved again": it_is_saved_again,
    "a million iterations": a_million_iterations,
    "seconds are counted once": seconds_are_counted_once,
}


def main(models: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    store = platforms.fresh_store()
    case = Case("llama", "dp2", "dp2")
    placed = place(experiment(models, layout(1, 1, None), case, all_ranks="0-1"), platform.world_size)
    actor = Actor(placed.actor, temperature=1.0, world=world)
    train(actor)
    found = {name: act(Scene(name, out, actor, platform, store)) for name, act in SCENES.items()}
    (out / f"rank_{platform.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
