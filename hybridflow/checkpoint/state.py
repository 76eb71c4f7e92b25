"""What a checkpoint holds beside weights and optimizer state: state.json, and NAME.safetensors of each thing that a
flow or a source of rollouts keeps: surplus, next_rollout, under_way.

    {"format": 1, "run": {"iteration": 12, "num_prompts_drawn": 3072, "kl_coef": 0.05, ...}, "config": {...},
     "digests": {"hybridflow's code": "5f0c...", ...}, "metrics": {"reward/score_mean": 0.8, ...}, "forked_from": null}

Numbers are written so that the same floats are read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.algorithms.rewards import RunningMoments
from hybridflow.checkpoint.store import STATE, STATE_FORMAT, read_state
from hybridflow.errors import CheckpointError

Tensors = Mapping[str, Tensor]
SUFFIX = ".safetensors"
NEEDED = {"surplus": ("prompts",), "next_rollout": ("prompts", "numbers", "report")}  # beside those of a rollout


@dataclass(frozen=True)
class RunState:
    """What decides the next step beside weights and optimizer state: with all three a run goes on as if not ended."""

    iteration: int = 0  # the last that was begun
    num_prompts_drawn: int = 0
    kl_coef: float = 0.0
    score_moments: RunningMoments = field(default_factory=RunningMoments)
    nonfinite_in_a_row: int = 0  # iterations that lost a step to a number that is not finite
    kept: Mapping[str, Tensors] = field(default_factory=dict)  # by name, what flows and sources of rollouts keep

    def keeping(self, name: str, tensors: Tensors | None) -> "RunState":
        """With other tensors of this name; None: with none."""
        others = {other: given for other, given in self.kept.items() if other != name}
        return replace(self, kept=others if tensors is None else others | {name: tensors})


@dataclass(frozen=True)
class SavedRun:
    """What state.json says."""

    state: RunState
    config: Mapping[str, Any]  # resolved
    digests: Mapping[str, str]  # of what the run was made of, in hexadecimal; versions as they are
    metrics: Mapping[str, float]  # of the iteration
    forked_from: str | None  # the checkpoint that the run began with, if it did not begin anew


def write_state(directory: Path, saved: SavedRun) -> None:
    metrics = {name: value for name, value in saved.metrics.items() if math.isfinite(value)}  # JSON knows no others
    run = asdict(replace(saved.state, kept={}))
    del run["kept"]
    tree = {
        "format": STATE_FORMAT,
        "run": run,
        "config": dict(saved.config),
        "digests": dict(saved.digests),
        "metrics": metrics,
        "forked_from": saved.forked_from,
    }
    (directory / STATE).write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for name, tensors in saved.state.kept.items():
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, directory / f"{name}{SUFFIX}")


def load_state(step: Path) -> SavedRun:
    """Errors: CheckpointError naming the file and what is wrong with it."""
    tree, file = read_state(step), step / STATE
    try:
        run = dict(tree["run"])
        moments = RunningMoments(**run["score_moments"])
        kept = {file.name.removesuffix(SUFFIX): _tensors(file) for file in sorted(step.glob(f"*{SUFFIX}"))}
        state = RunState(**run | {"score_moments": moments, "kept": kept})
        return SavedRun(state, tree["config"], tree["digests"], tree["metrics"], tree["forked_from"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: is not of this version: {type(error).__name__}: {error}") from error


def _tensors(file: Path) -> Tensors:
    try:
        tensors = load_file(file)
        for name in NEEDED.get(file.name.removesuffix(SUFFIX), ()):
            tensors[name]
        return tensors
    except (SafetensorError, KeyError, OSError) as error:
        raise CheckpointError(f"{file}: is damaged: {error}") from error
