"""Run directories as training leaves them, made by its own writers from literal numbers."""

import json
import math
from pathlib import Path

import yaml

from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.recording.run_dir import write_layout
from hybridflow.recording.writers import MetricsWriter, SampleWriter

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> & 7 < 8"
CONFIG = {"name": "x", "seed": 1, "actor": {"model": HOSTILE, "optimizer": {"lr": 1e-3}}, "stop": ["a", "b"]}


BEGAN = 1_780_000_000.0  # 2026-05-28 20:26:40 UTC
STARTED = {
    "began": BEGAN,
    "command": "hybridflow train my.yaml name='a b'",
    "versions": {"hybridflow": "0.1.0", "torch": "2.13.0+cpu"},
    "commit": "0123456789ab",
    "process": ["another machine", 7, 8],
}


def write_start(path: Path, *, how: str | None = "finished", why: str = "", seconds: float = 3725.0) -> None:
    """One start of a run, on another machine; without an end where `how` is None."""
    end = [] if how is None else [{"ended": BEGAN + seconds, "how": how, "why": why}]
    (path / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (STARTED, *end)))


def make_run(path: Path, *, seed: int = 1, num_iterations: int = 6, layout: bool = True) -> Path:
    """actor/loss is 1 / iteration and not finite in the third, eval/accuracy is there before training and every third
    iteration; `reward/<b>x</b>` is a metric that a user's function has named."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"seed": seed}, sort_keys=False))
    metrics = MetricsWriter(path, csv=True, tensorboard=False)
    samples = SampleWriter(path / "samples.jsonl")
    metrics.write(0, {"eval/accuracy": 0.25})
    for i in range(1, num_iterations + 1):
        row = {"actor/loss": math.nan if i == 3 else 1 / i, "reward/score_mean": i * seed, "reward/<b>x</b>": 1e-5}
        row |= {"time/rollout_seconds": 2.0, "time/estimate_seconds": 1.0, "time/update_seconds": 3.0 + i}
        row["time/generate_seconds"] = 1.5
        metrics.write(i, row | ({"eval/accuracy": 0.5} if i % 3 == 0 else {}))
        samples.write(
            i,
            [
                {
                    "prompt": f"{i} + {i} =",
                    "response": f"{HOSTILE} {2 * i}",
                    "score": seed / 4,
                    "parts": {"rule": seed / 4},
                    "kind": "train",
                    "columns": {"answer": str(2 * i)},
                }
            ],
        )
    metrics.close()
    samples.close()
    write_start(path)
    if layout:
        roles = {"actor": Layout(2, 2, 1, (0, 1, 2, 3)), "critic": Layout(1, 1, 2, (2, 3), vpp=1)}
        write_layout(path, 4, roles, RolloutLayout(2, 1, ((0, 1), (2, 3))))
    return path
