"""Runs of `hybridflow.train` one after the other, each a config of the quickstarts with overrides."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.shipped import shipped_configs

NUM_RANKS = 2
NUM_SHOWN = 20  # last lines of the log of a run that has failed
Train = Callable[[list[str], Path], int]  # (arguments of hybridflow train, where the log goes) -> exit status
SHOW_EVERY = 20.0  # seconds between two lines of a training that are shown
# Of `sft` from random weights. A constant rate, so that the run may end at any iteration: while much is still wrong.
HALF_TRAINED = (
    "num_epochs=null",
    "num_iterations=600",
    "actor.optimizer={lr: 1.0e-3, warmup_iterations: 40}",
    "metrics.eval_interval=5",
    "stop_when={metric: eval/loss, at_most: 0.42}",
)


class RunFailed(RuntimeError):
    """A run has ended with an error."""


@dataclass(frozen=True)
class Runs:
    """Those of one seed, in DIRECTORY/runs; what they say goes to `logs`. overrides: further ones of each."""

    directory: Path
    seed: int
    train: Train
    logs: Path
    overrides: tuple[str, ...] = ()

    def run(self, name: str, config: str, *overrides: str) -> Path:
        """Run configs/quickstart_CONFIG.yaml to the end; gives the run's directory. Errors: RunFailed."""
        own = [
            f"name={name}",
            f"seed={self.seed}",
            f"output_dir={self.directory / 'runs'}",
            "metrics.tensorboard=false",
        ]
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        status = self.train(
            [str(shipped_configs() / f"quickstart_{config}.yaml"), *own, *overrides, *self.overrides], log
        )
        if status:
            end = "\n".join(log.read_text(encoding="utf-8").splitlines()[-NUM_SHOWN:]) if log.exists() else ""
            raise RunFailed(f"seed {self.seed}: {name} has ended with status {status}\n{end}".rstrip())
        return self.directory / "runs" / name


def by_command(arguments: list[str], log: Path) -> int:
    """Exit status of one run, as a person starts a run. Shows the command, and now and then a line."""
    command = [sys.executable, "-m", "hybridflow", "train", *arguments, "--nproc", str(NUM_RANKS)]
    print(f"$ {shlex.join(['hybridflow', *command[3:]])}", flush=True)
    shown = time.monotonic()
    with log.open("w", buffering=1, encoding="utf-8") as file:
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        )
        assert running.stdout is not None, "it is a pipe"
        for line in running.stdout:
            file.write(line)
            if time.monotonic() - shown > SHOW_EVERY:
                shown = time.monotonic()
                print(f"    {line.rstrip()}", flush=True)
        return running.wait()


def rows(train: Path, heldout: Path) -> tuple[str, str]:
    """The overrides for rows to train on and to judge by."""
    return f"data.train={train}", f"data.heldout={heldout}"


def last_of(run: Path, metric: str) -> float:
    """The last value that a run has recorded of a metric."""
    header, *values = (line.split(",") for line in (run / "metrics.csv").read_text(encoding="utf-8").splitlines())
    return float([row[header.index(metric)] for row in values if row[header.index(metric)]][-1])
