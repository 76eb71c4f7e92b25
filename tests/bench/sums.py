"""configs/smollm2_sums.yaml beside TRL's GRPOTrainer: accuracy by iteration and seconds by phase, for docs/results.

    python -m tests.bench.sums --environment DIR [--seeds 1 2 3] [--iterations N] [--only hybridflow ...]

DIR gets a virtual environment with TRL where it has none, and in DIR/sums settings, logs and results. All programs have
the same weights, rows in the same order, samples, rate, optimizer and steps, and two threads. They run in turn on an
otherwise idle machine: A B C A B C. Results that are there already are kept: a run that was cut goes on.
"""

import argparse
import csv
import json
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridflow.config import ExperimentConfig
from tests.bench.peer_programs.environment import peer_python
from tests.bench.peer_programs.programs import PROGRAMS, THREADS, run, torchrun
from tests.bench.peer_programs.workload import PHASES, phases

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "smollm2_sums.yaml"
PEERS = {"TRL, generate": ("generate", 2), "TRL, vLLM": ("vllm", 1)}  # how it generates, processes
NAMES = ("hybridflow", *PEERS)
Result = dict[str, Any]  # accuracy: by iteration; seconds: of each iteration by phase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--iterations", type=int, metavar="N", help="replaces num_iterations of the config")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    python = peer_python(options.environment.absolute()) if {*options.only} & PEERS.keys() else None
    work = options.environment.absolute() / "sums"
    work.mkdir(parents=True, exist_ok=True)
    print(f"load average: {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    found: dict[str, list[Result]] = {name: [] for name in options.only}
    for seed in options.seeds:
        overrides = [f"seed={seed}", f"name=sums_{seed}", f"output_dir={work}", "data.shuffle=false"]
        overrides += [] if options.iterations is None else [f"num_iterations={options.iterations}"]
        config = ExperimentConfig.from_yaml(CONFIG, overrides)
        for name in options.only:
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            made = ours(config, overrides, work) if name not in PEERS else peer(name, config, work, str(python))
            found[name].append(made)
    print_tables(found, options.seeds)


def ours(config: ExperimentConfig, overrides: list[str], work: Path) -> Result:
    metrics = config.run_dir / "metrics.csv"
    if len(rows_of(metrics)) <= config.num_iterations:  # the first is of the model as it was
        log = work / f"{config.name}.log"
        run(torchrun(sys.executable, 2, "hybridflow.train", str(CONFIG), *overrides), log, threads=1)
    rows = rows_of(metrics)
    accuracy = {int(row["iteration"]): float(row["eval/accuracy"]) for row in rows if row.get("eval/accuracy")}
    stages = ("rollout", "estimate", "update")
    return {
        "accuracy": accuracy,
        "seconds": [phases(*(float(row[f"time/{stage}_seconds"]) for stage in stages)) for row in rows[1:]],
    }


def peer(name: str, config: ExperimentConfig, work: Path, python: str) -> Result:
    how, processes = PEERS[name]
    path = work / f"{how}_{config.seed}_{config.num_iterations}.json"
    if not path.with_suffix(".result.json").exists():
        path.write_text(json.dumps(setting(config, path.with_suffix("")), indent=1))
        command = torchrun(python, processes, f"{PROGRAMS}.trl_sums", str(path), how)
        run(command, path.with_suffix(".log"), threads=THREADS // processes)
    made: Result = json.loads(path.with_suffix(".result.json").read_text())
    return made | {"accuracy": {int(iteration): share for iteration, share in made["accuracy"].items()}}


def setting(config: ExperimentConfig, scratch: Path) -> dict[str, Any]:
    """What TRL is told: of the config, and the defaults that trl_sums sets by hand are those of hybridflow."""
    optimizer, update = config.actor.optimizer, config.algorithm.update
    return {
        "model": config.actor.model,
        "train": config.data.train,
        "heldout": config.data.heldout_sets[""].files,
        "scratch": str(scratch),
        "seed": config.seed,
        "iterations": config.num_iterations,
        "eval_interval": config.metrics.eval_interval,
        "samples": config.sampling.samples_per_prompt,
        "rows": config.data.prompts_per_iteration * config.sampling.samples_per_prompt,
        "mini_batch": update.mini_batch_size,
        "tokens": config.sampling.max_response_length,
        "longest": config.max_sequence_length,
        "lr": optimizer.lr,
        "schedule": optimizer.schedule,
    }


def rows_of(metrics: Path) -> list[dict[str, str]]:
    if not metrics.exists():
        return []
    with metrics.open(newline="") as file:
        return list(csv.DictReader(file))


def print_tables(found: Mapping[str, list[Result]], seeds: list[int]) -> None:
    console = Console(width=140)
    accuracy = Table("program", "seed", title="held-out accuracy by iteration")
    iterations = sorted(next(iter(found.values()))[0]["accuracy"])
    for iteration in iterations:
        accuracy.add_column(str(iteration), justify="right")
    for name, results in found.items():
        for seed, result in zip(seeds, results, strict=True):
            accuracy.add_row(name, str(seed), *(f"{result['accuracy'][each]:.1%}" for each in iterations))
    console.print(accuracy)
    seconds = Table("program", *PHASES, "all iterations", title="median seconds of an iteration")
    for name, results in found.items():
        every = [row for result in results for row in result["seconds"]]
        medians = [f"{statistics.median(row[phase] for row in every):.2f}" for phase in PHASES]
        whole = [sum(row["total"] for row in result["seconds"]) for result in results]
        seconds.add_row(name, *medians, ", ".join(f"{each:.0f}" for each in whole))
    console.print(seconds)


if __name__ == "__main__":
    main()
