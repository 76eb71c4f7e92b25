"""Every algorithm from the quickstart's policy, on several seeds: a table of held-out accuracy and a picture.

    python -m tests.bench.algorithms [--seeds 1 2 3] [--only grpo rloo] [--svg docs/algorithms.svg]

Each run is what `bash launch/quickstart.sh CONFIG` starts, and stays in runs/algorithms; one that is whole there is not
made again. All together take about an hour on two cores.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hybridflow.cli.plot_curve import Curve, draw, read_curve
from hybridflow.config import ExperimentConfig

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs", "algorithms")
ACCURACY = "eval/accuracy"
GRPO = "quickstart_grpo.yaml"
VARIANTS: dict[str, tuple[str, ...]] = {  # name: config, what differs from it
    "ppo": ("quickstart_rule.yaml",),
    "vapo": (
        "quickstart_rule.yaml",
        "num_iterations=250",
        "algorithm.value_gae_lambda=1.0",
        "algorithm.length_adaptive_alpha=0.05",
        "algorithm.positive_nll_coef=0.1",
        "algorithm.policy={clip_range: 0.2, clip_range_high: 0.28, loss_mean: token_mean}",
    ),
    "grpo": (GRPO,),
    "dapo": ("quickstart_dapo.yaml",),
    "dr_grpo": ("quickstart_dr_grpo.yaml",),
    "gspo": ("quickstart_gspo.yaml",),
    "cispo": (GRPO, "algorithm.policy={kind: cispo, loss_mean: token_mean}"),
    "sapo": (GRPO, "algorithm.policy={kind: sapo}"),
    "rloo": ("quickstart_rloo.yaml",),
    "opo": ("quickstart_opo.yaml",),
    "maxrl": ("quickstart_maxrl.yaml",),
    "remax": ("quickstart_remax.yaml",),
    "reinforce": ("quickstart_reinforce.yaml",),
    "reinforce, baseline": (GRPO, "algorithm={name: reinforce, baseline: group, update: {mini_batch_size: 128}}"),
}


@dataclass(frozen=True)
class Outcome:
    curve: Curve  # accuracy by iteration
    seconds: float  # of all iterations, evaluations apart


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--svg", type=Path, help="draw the mean of the seeds, by iteration")
    options = parser.parse_args(arguments)
    found = {name: [outcome(name, seed) for seed in options.seeds] for name in options.only}
    print(table(found, options.seeds))
    if options.svg:
        options.svg.write_text(draw({name: mean_curve(of) for name, of in found.items()}, f"{ACCURACY}, mean of seeds"))


def outcome(name: str, seed: int) -> Outcome:
    file, *overrides = VARIANTS[name]
    run = f"{name.replace(', ', '_')}_{seed}"
    overrides += [f"seed={seed}", f"name={run}", f"output_dir={RUNS}", "metrics.eval_interval=10"]
    config = ExperimentConfig.from_yaml(ROOT / "configs" / file, overrides)
    metrics = ROOT / RUNS / run / "metrics.csv"
    if len(rows(metrics)) <= config.num_iterations:  # the first is of the policy as it was
        print(f"{run}: {config.num_iterations} iterations", file=sys.stderr, flush=True)
        train(ROOT / "configs" / file, overrides)
    seconds = sum(float(row["time/iteration_seconds"]) for row in rows(metrics)[1:])
    return Outcome(read_curve(metrics, ACCURACY), seconds)


def rows(metrics: Path) -> list[dict[str, str]]:
    if not metrics.exists():
        return []
    with metrics.open(newline="") as file:
        return list(csv.DictReader(file))


def train(config: Path, overrides: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [*torchrun, "-m", "hybridflow.train", str(config), *overrides]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def table(found: dict[str, list[Outcome]], seeds: list[int]) -> str:
    """In Markdown; before -> after for each seed, and how much the least of them has won."""
    columns = [f"seed {seed}" for seed in seeds]
    lines = ["| algorithm | iterations | before | " + " | ".join(columns) + " | least gain | training time |"]
    lines.append("|" + "---|" * (len(columns) + 5))
    for name, outcomes in found.items():
        before, after = ([of.curve[i][1] for of in outcomes] for i in (0, -1))
        gain = min(last - first for first, last in zip(before, after, strict=True))
        spent = [of.seconds for of in outcomes]
        lines.append(
            f"| {name} | {outcomes[0].curve[-1][0]:.0f} | {before[0]:.1%} | {' | '.join(f'{x:.1%}' for x in after)} "
            f"| {100 * gain:.1f} points | {min(spent):.0f} to {max(spent):.0f} s |"
        )
    return "\n".join(lines)


def mean_curve(outcomes: list[Outcome]) -> Curve:
    points = zip(*(of.curve for of in outcomes), strict=True)
    return [(same[0][0], statistics.mean(value for _, value in same)) for same in points]


if __name__ == "__main__":
    main()
