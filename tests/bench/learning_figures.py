"""The pictures of docs/guides/is-it-learning.md: a healthy run, and runs that go wrong on purpose, on two CPU cores.

    python -m tests.bench.learning_figures        # after bash launch/quickstart.sh, which makes the model; 15 minutes

Each run is configs/quickstart_grpo.yaml with a fault. It leaves runs/figures/NAME and docs/guides/learning/*.svg, and
docs/results/learning/NAME.csv with the columns that are drawn.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

from hybridflow.cli.plot_curve import draw, read_curve

ROOT = Path(__file__).resolve().parents[2]
RUNS, SVGS, ROWS = (
    ROOT / "runs" / "figures",
    ROOT / "docs" / "guides" / "learning",
    ROOT / "docs" / "results" / "learning",
)
CONFIG = "configs/quickstart_grpo.yaml"
EVERY = ("num_iterations=60", "metrics.eval_interval=10", f"output_dir={RUNS}", "checkpoint.load=none")
NO_KL = "algorithm.kl.coef=0"
FAULTS: dict[str, tuple[str, ...]] = {
    "healthy": (),
    "rate_too_low": ("actor.optimizer.lr=1e-8",),
    "rate_too_high": ("actor.optimizer.lr=1e-2", NO_KL),
    "cold": ("sampling.temperature=0.4",),
    "temperature_too_low": ("sampling.temperature=0.1",),  # ends with an error: a gradient is not finite
    "truncated_sampling": ("sampling.top_p=0.5",),
    "reward_of_length": (
        "reward.functions.0.function=tests.bench.learning_figures:length",
        "sampling.max_response_length=32",
    ),
}
# picture -> (metric, runs beside the healthy one)
PICTURES = {
    "reward_flat": ("reward/score_mean", ("rate_too_low",)),
    "accuracy_falls": ("eval/accuracy", ("rate_too_high",)),
    "kl_rises": ("kl/reference_mean", ("rate_too_high",)),
    "entropy_falls": ("actor/entropy", ("cold",)),
    "log_prob_difference": ("rollout/log_prob_diff_mean", ("truncated_sampling",)),
    "length_runs_away": ("rollout/response_length_mean", ("reward_of_length",)),
}


def length(prompts: list[str], responses: list[str], columns: dict[str, list[object]]) -> list[float]:
    """A reward that a person did not mean: longer is better."""
    return [len(response) / 10 for response in responses]


def main() -> None:
    for name, overrides in FAULTS.items():
        if not (RUNS / name / "metrics.csv").exists():
            command = [sys.executable, "-m", "hybridflow", "train", CONFIG, f"name={name}", *EVERY, *overrides]
            print(f"$ {' '.join(command[3:])}", flush=True)
            ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
            print(json.dumps({"name": name, "status": ended.returncode}), flush=True)
    SVGS.mkdir(parents=True, exist_ok=True)
    ROWS.mkdir(parents=True, exist_ok=True)
    for picture, (metric, names) in PICTURES.items():
        curves = {}
        for name in ("healthy", *names):
            curves[name] = read_curve(RUNS / name / "metrics.csv", metric)
        (SVGS / f"{picture}.svg").write_text(draw(curves, metric))
    metrics = ["iteration", *dict.fromkeys(metric for metric, _ in PICTURES.values())]
    for name in FAULTS:
        with (RUNS / name / "metrics.csv").open(newline="") as source, (ROWS / f"{name}.csv").open("w") as target:
            rows = list(csv.DictReader(source))
            writer = csv.DictWriter(target, metrics, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
