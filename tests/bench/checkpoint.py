"""What saving costs training, with and without checkpoint.async_save, and saving and loading beside a plain copy.

    torchrun --nproc-per-node 1 -m tests.bench.checkpoint [--layers 6] [--rounds 3] [--directory DIR]

An actor in float32 with its Adam, a Llama of hidden size 1024: 0.2 GB of checkpoint a layer. Turn by turn, in one run:

    training alone, with a save first that is waited for, with a save first that is not: the same steps each time
    a copy of the checkpoint's files, on the disk when it is over; a load, that reads and checks every byte

`blocked` is the time until training goes on; `loop` is what the steps took longer than alone, what the background takes
of the cores included. Seconds are medians over the rounds.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybridflow.checkpoint.resume import find_source, restore
from hybridflow.checkpoint.state import RunState, SavedRun
from hybridflow.checkpoint.store import CHECKPOINTS, LATEST, step_name
from hybridflow.checkpoint.writer import CheckpointWriter
from hybridflow.config import CheckpointConfig, ExperimentConfig
from hybridflow.config.losses import KL, PolicyLoss
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import KLTerm, policy_loss
from hybridflow.roles.policy import Actor
from tests.distributed.train_batch import make_train_batch
from tests.tools.convert.large import CONFIG, make_large

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
BUCKET_BYTES = 24 << 20


def main() -> None:
    options = parse()
    platform = platforms.start(seed=0)
    name = [tempfile.mkdtemp(dir=options.directory)]
    dist.broadcast_object_list(name, src=0)
    directory = Path(name[0])
    try:
        if platform.rank == 0:
            make_large(directory / "model", CONFIG | SIZES | {"num_hidden_layers": options.layers})
            plain_numbers(directory / "model")
        dist.barrier()
        Bench(directory, platform).run(options.rounds)
        dist.barrier()
    finally:
        if platform.rank == 0:
            shutil.rmtree(directory)
    platforms.stop()


def plain_numbers(model: Path) -> None:
    """Random bits hold NaNs, and a step of NaNs is none: weights that train."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        random = {key: 0.02 * torch.randn(x.shape, generator=generator) for key, x in tensors.items()}
        save_file({key: x.to(torch.bfloat16) for key, x in random.items()}, file)


class Bench:
    """One actor, the ways to save it, and their seconds."""

    def __init__(self, directory: Path, platform: platforms.Platform) -> None:
        self.directory, self.platform = directory, platform
        self.group = platforms.world_group()
        world = RunContext(platform, ProcessGroups(), Exchange(self.group, platform.device), BUCKET_BYTES)
        self.config = config(directory)
        self.actor = Actor(place(self.config, platform.world_size).actor, temperature=1.0, world=world)
        self.actor.begin_iteration(1, 1)
        self.store, self.iteration = platforms.fresh_store(), 0
        self.savers = {name: self.saver(name == "async") for name in ("sync", "async")}
        self.seconds: dict[str, list[float]] = {}
        self.num_steps = 1

    def saver(self, in_background: bool) -> CheckpointWriter:
        return CheckpointWriter(
            [self.actor],
            self.directory / "run" / CHECKPOINTS,
            CheckpointConfig(async_save=in_background, keep_last=1),
            config_yaml="",
            platform=self.platform,
            group=self.group,
            store=dist.PrefixStore(str(in_background), self.store),
        )

    def run(self, rounds: int) -> None:
        for _ in range(2):  # moments, pages, copies: what is there from the second time on
            self.timed("", lambda: self.save("async", wait=True))
            step = self.timed("", self.step)
        save = self.timed("", lambda: self.save("sync", wait=True))
        self.num_steps = max(1, int(3 * save / step) + 1)  # a save in the background ends while they last
        for _ in range(rounds):
            self.timed("alone", self.steps)
            for name in self.savers:
                self.timed(f"{name} loop", lambda name=name: self.steps(name))
                self.savers[name].wait()
            self.timed("save", lambda: self.save("sync", wait=True))
            self.timed("copy", self.copy)
            self.timed("load", self.load)
        if self.platform.rank == 0:
            self.report()

    def timed(self, name: str, action: Callable[[], None]) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return self.seconds[name][-1]

    def steps(self, name: str | None = None) -> None:
        """The same steps each time; first, where `name` says how, a save."""
        started = time.perf_counter()
        if name is not None:
            self.save(name)
            self.seconds.setdefault(f"{name} blocked", []).append(time.perf_counter() - started)
        for _ in range(self.num_steps):
            self.step()
            if name is not None:
                self.savers[name].check()

    def step(self) -> None:
        self.actor.steps = []
        self.actor.update(make_train_batch(), policy_loss(PolicyLoss(), KLTerm(KL(use="none"), 0.0)))

    def save(self, name: str, *, wait: bool = False) -> None:
        self.iteration += 1
        self.savers[name].save(SavedRun(RunState(iteration=self.iteration), {}, {}, {}, None))
        if wait:
            self.savers[name].wait()

    def copy(self) -> None:
        """As `cp -r` and `sync` of the files would."""
        if self.platform.rank == 0:
            target = self.directory / "copy"
            shutil.copytree(self.newest(), target)
            for file in [path for path in target.rglob("*") if path.is_file()]:
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        dist.barrier()
        if self.platform.rank == 0:
            shutil.rmtree(self.directory / "copy")

    def load(self) -> None:
        source = find_source(self.config, restarts=0, group=self.group)
        assert source is not None and not source.notes
        restore(source, [self.actor], self.group)

    def newest(self) -> Path:
        checkpoints = self.directory / "run" / CHECKPOINTS
        assert (checkpoints / LATEST).read_text().strip() == step_name(self.iteration)
        return checkpoints / step_name(self.iteration)

    def report(self) -> None:
        median = {name: statistics.median(values) for name, values in self.seconds.items()}
        num_bytes = sum(file.stat().st_size for file in self.newest().rglob("*") if file.is_file())
        machine = f"{self.platform.world_size} ranks, {os.cpu_count()} cores"
        title = f"{num_bytes / 1e9:.2f} GB, {machine}, {self.num_steps} steps"
        table = Table(title=title, title_justify="left")
        for column in ("", "seconds", "of a synchronous save"):
            table.add_column(column, justify="right" if column else "left")
        sync = median["sync blocked"]
        for name in ("sync", "async"):
            for kind in ("blocked", "loop"):
                cost = median[f"{name} {kind}"] - (median["alone"] if kind == "loop" else 0)
                table.add_row(f"{name}, {kind}", f"{cost:.2f}", f"{cost / sync:.3f}")
        table.add_row("steps alone", f"{median['alone']:.2f}", "")
        both, copy = median["save"] + median["load"], median["copy"]
        Console().print(table)
        sums = f"save {median['save']:.2f} s + load {median['load']:.2f} s = {both:.2f} s"
        Console().print(f"{sums}; copy {copy:.2f} s; ratio {both / copy:.2f}")


def config(directory: Path) -> ExperimentConfig:
    optimizer = {"name": "adam", "lr": 1e-5}
    model = {"model": str(directory / "model"), "dtype": "float32", "optimizer": optimizer}
    return ExperimentConfig.model_validate(
        {
            "name": "run",
            "output_dir": str(directory),
            "num_iterations": 1,
            "data": {"train": "given", "prompts_per_iteration": 8, "max_prompt_length": 9},
            "sampling": {"max_response_length": 8},
            "actor": model,
            "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
            "algorithm": {"name": "grpo", "kl": {"use": "none"}},
        }
        | {"sampling": {"max_response_length": 8, "samples_per_prompt": 2}}
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure (default: the system's)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
