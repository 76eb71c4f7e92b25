"""One-step-off rollouts against synchronous ones, with responses of skewed lengths, on 3 ranks.

    python -m tests.bench.one_step_off [--size small] [--rounds 2] [--iterations 8]

A random Llama model learns by GRPO. Responses end by chance: most are short, and few reach the limit. Three ways take
turns, each in a run of its own:

- stale: actor and reference on ranks 0 and 1, the engine on rank 2, `rollout.max_staleness: 1`;
- apart: the same ranks, a synchronous run;
- colocated: all roles and the engine on all three ranks.

Seconds are medians of the iterations of all rounds without each run's first two and the last one: the first rollout of
a stale run is made while nobody trains, and the last iteration makes no next one. The rows say what the models
computed, what they waited for a rollout, and what the engine waited for the models. With fewer processors than ranks
the ways share them: an engine that works beside the models then slows the models down.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.iteration import SIZES, Shape, config, make_inputs

ROOT = Path(__file__).resolve().parents[2]
WAYS: Mapping[str, tuple[str | None, str | None, int]] = {  # ranks of the models, of the engine, rollout.max_staleness
    "stale": ("0-1", "2", 1),
    "apart": ("0-1", "2", 0),
    "colocated": (None, None, 0),
}
NAMES = {
    "time/iteration_seconds": "iteration",
    "time/generate_seconds": "generation",
    "time/estimate_seconds": "scoring",
    "time/update_seconds": "update",
    "time/rollout_seconds": "rollout stage of the models",
    "time/engines_wait_seconds": "wait of the engine",
    "rollout/response_length_mean": "mean response, tokens",
    "rollout/response_length_p99": "percentile 99, tokens",
}
LEFT_OUT = 2  # iterations at the begin of a run; of its end one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4, help="responses to a prompt")
    parser.add_argument("--mean-response-length", type=int, default=48)
    parser.add_argument("--response-length", type=int, default=384, help="the limit")
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way, in turns")
    options = parser.parse_args()
    shape = Shape(
        options.prompts,
        64,
        options.response_length,
        options.mini_batches,
        options.mean_response_length,
        options.samples,
    )
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        make_inputs(Path(directory) / options.size, options.size, shape)
        for _ in range(options.rounds):
            for way in WAYS:
                found[way] += trained(way, Path(directory), options.size, shape, options.iterations)
    report(found, f"{options.size}, float32, {options.prompts} x {options.samples} responses")


def trained(way: str, directory: Path, size: str, shape: Shape, iterations: int) -> list[dict[str, float]]:
    """Metrics of the iterations that count."""
    path = directory / "config.json"
    path.write_text(json.dumps(tree_of(way, directory, size, shape, iterations)))
    command = [sys.executable, "-m", "hybridflow", "train", str(path), "--nproc", "3"]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with (directory / way / "metrics.csv").open(newline="") as file:
        rows = [{name: float(row.get(name) or 0.0) for name in NAMES} for row in csv.DictReader(file)]
    assert len(rows) == iterations
    return rows[LEFT_OUT:-1]


def tree_of(way: str, directory: Path, size: str, shape: Shape, iterations: int) -> dict[str, Any]:
    models, engine, staleness = WAYS[way]
    tree: dict[str, Any] = config(directory / size, "float32", shape, 1, 1).model_dump(mode="json")
    tree |= {"name": way, "num_iterations": iterations, "output_dir": str(directory)}
    tree["checkpoint"] |= {"load": "none", "save_minutes": None}
    for role in ("actor", "reference"):
        tree[role]["ranks"] = models
    tree["rollout"] |= {"ranks": engine, "max_staleness": staleness}
    # no weights go with the bias by which responses end, and all ways train by the same loss
    tree["algorithm"]["policy"]["importance"] = None
    return tree


def report(found: Mapping[str, list[dict[str, float]]], title: str) -> None:
    count = len(found["stale"])
    table = Table(title=f"{title}: seconds, medians of {count} iterations")
    for column in ("", *found):
        table.add_column(column, justify="right" if column else "left")
    medians = {
        way: {name: statistics.median(row[name] for row in rows) for name in NAMES} for way, rows in found.items()
    }
    for name, text in NAMES.items():
        table.add_row(text, *(f"{medians[way][name]:.3f}" for way in found))
    console = Console(width=100, highlight=False)
    console.print(table)
    stale, apart, colocated = (medians[way]["time/iteration_seconds"] for way in ("stale", "apart", "colocated"))
    processors = len(os.sched_getaffinity(0))
    console.print(
        f"3 ranks on {processors} processors, load {os.getloadavg()[0]:.1f}: one-step-off is {apart / stale:.2f}x as "
        f"fast as synchronous on the same ranks, and {colocated / stale:.2f}x as fast as colocated on all three"
    )


if __name__ == "__main__":
    main()
