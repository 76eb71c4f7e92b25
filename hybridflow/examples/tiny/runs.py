"""Runs of `hybridflow.train` one after the other, each a config of the quickstarts with overrides."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
NUM_RANKS = 2
Train = Callable[[list[str]], int]  # the arguments of hybridflow.train -> its exit status
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
    """Those of one seed, in DIRECTORY/runs. overrides: further ones of each."""

    directory: Path
    seed: int
    train: Train
    overrides: tuple[str, ...] = ()

    def run(self, name: str, config: str, *overrides: str) -> Path:
        """configs/quickstart_CONFIG.yaml to its end; its directory. Errors: RunFailed."""
        own = [
            f"name={name}",
            f"seed={self.seed}",
            f"output_dir={self.directory / 'runs'}",
            "metrics.tensorboard=false",
        ]
        status = self.train([str(CONFIGS / f"quickstart_{config}.yaml"), *own, *overrides, *self.overrides])
        if status:
            raise RunFailed(f"seed {self.seed}: {name} has ended with status {status}; what it said stands above")
        return self.directory / "runs" / name


def by_torchrun(arguments: list[str]) -> int:
    """One run to its end, with its command; its exit status."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "-m", "hybridflow.train", *arguments]
    print(f"$ python {shlex.join(command)}", flush=True)
    return subprocess.run(
        ["env", "OMP_NUM_THREADS=1", "TORCH_CPP_LOG_LEVEL=ERROR", sys.executable, *command]
    ).returncode


def rows(train: Path, heldout: Path) -> tuple[str, str]:
    """The overrides for rows to train on and to judge by."""
    return f"data.train={train}", f"data.heldout={heldout}"


def last_of(run: Path, metric: str) -> float:
    """The last value that a run has recorded of a metric."""
    header, *values = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines())
    return float([row[header.index(metric)] for row in values if row[header.index(metric)]][-1])
