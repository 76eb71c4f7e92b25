"""What a checkpoint holds beside weights and optimizer state: state.json, and where there are any surplus.safetensors,
next_rollout.safetensors and under_way.safetensors.

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

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.algorithms.rewards import RunningMoments
from hybridflow.checkpoint.store import STATE, STATE_FORMAT, read_state
from hybridflow.errors import CheckpointError

SURPLUS, NEXT, PROMPTS = "surplus.safetensors", "next_rollout.safetensors", "prompts"
UNDER_WAY = "under_way.safetensors"
NUMBERS, REPORT = "numbers", "report"  # in the file of the next rollout


@dataclass(frozen=True, eq=False)
class Surplus:
    """Groups of responses beyond the batch of an iteration: the first groups of the next iteration.

    prompts: numbers in the data set, one a group. tensors: a rollout's, raw_scores, and their parts.
    """

    prompts: tuple[int, ...]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class NextRollout:
    """The rollout that a later iteration trains on, made while the iterations before it trained.

    iteration: the one whose number is in the seeds. prompts: numbers in the data set. position: how many prompts the
    run has drawn with these. version: of the actor that made the rollout. report: what the engines' ranks measured,
    float64. tensors: a rollout's.
    """

    iteration: int
    prompts: tuple[int, ...]
    position: int
    version: int
    report: Tensor
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class RunState:
    """What decides the next step beside weights and optimizer state: with all three a run goes on as if not ended."""

    iteration: int = 0  # the last that was begun
    num_prompts_drawn: int = 0
    kl_coef: float = 0.0
    score_moments: RunningMoments = field(default_factory=RunningMoments)
    nonfinite_in_a_row: int = 0  # iterations that lost a step to a number that is not finite
    surplus: Surplus | None = None
    next_rollout: NextRollout | None = None  # in checkpoints; else with `flows.one_step_off`
    under_way: Mapping[str, Tensor] | None = None  # the same of `flows.partial`: tensors of `rollout.partial.UnderWay`


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
    run = asdict(replace(saved.state, surplus=None, next_rollout=None, under_way=None))
    del run["surplus"], run["next_rollout"], run["under_way"]
    tree = {
        "format": STATE_FORMAT,
        "run": run,
        "config": dict(saved.config),
        "digests": dict(saved.digests),
        "metrics": metrics,
        "forked_from": saved.forked_from,
    }
    (directory / STATE).write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    surplus, following = saved.state.surplus, saved.state.next_rollout
    if surplus is not None:
        _write(directory / SURPLUS, surplus.tensors, surplus.prompts)
    if following is not None:
        numbers = torch.tensor([following.iteration, following.position, following.version], dtype=torch.int64)
        beside = {NUMBERS: numbers, REPORT: following.report}
        _write(directory / NEXT, {**following.tensors, **beside}, following.prompts)
    if saved.state.under_way is not None:
        save_file(dict(saved.state.under_way), directory / UNDER_WAY)


def _write(file: Path, tensors: Mapping[str, Tensor], prompts: tuple[int, ...]) -> None:
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(own | {PROMPTS: torch.tensor(prompts, dtype=torch.int64)}, file)


def load_state(step: Path) -> SavedRun:
    """Errors: CheckpointError naming the file and what is wrong with it."""
    tree, file = read_state(step), step / STATE
    try:
        run = dict(tree["run"])
        moments = RunningMoments(**run["score_moments"])
        beside = {
            "surplus": _surplus(step / SURPLUS),
            "next_rollout": _next_rollout(step / NEXT),
            "under_way": _tensors(step / UNDER_WAY),
        }
        state = RunState(**run | {"score_moments": moments} | beside)
        return SavedRun(state, tree["config"], tree["digests"], tree["metrics"], tree["forked_from"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: is not of this version: {type(error).__name__}: {error}") from error


def _surplus(file: Path) -> Surplus | None:
    found = _read(file)
    return None if found is None else Surplus(*found)


def _next_rollout(file: Path) -> NextRollout | None:
    found = _read(file, NUMBERS, REPORT)
    if found is None:
        return None
    prompts, tensors = found
    iteration, position, version = tensors.pop(NUMBERS).tolist()
    return NextRollout(iteration, prompts, position, version, report=tensors.pop(REPORT), tensors=tensors)


def _read(file: Path, *needed: str) -> tuple[tuple[int, ...], dict[str, Tensor]] | None:
    """Numbers of prompts, and tensors; None where there is no such file."""
    tensors = _tensors(file, PROMPTS, *needed)
    return None if tensors is None else (tuple(tensors.pop(PROMPTS).tolist()), tensors)


def _tensors(file: Path, *needed: str) -> dict[str, Tensor] | None:
    """None where there is no such file."""
    if not file.exists():
        return None
    try:
        tensors = load_file(file)
        for name in needed:
            tensors[name]
        return tensors
    except (SafetensorError, KeyError, OSError) as error:
        raise CheckpointError(f"{file}: is damaged: {error}") from error
