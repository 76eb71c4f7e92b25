"""Runs whose engine has the actor's weights in one way or another: without checkpoints, with them, and resumed.

torchrun --nproc-per-node 2 -m tests.checkpoint.engine_layouts_worker ROOT CASE ...
"""

import sys
from pathlib import Path

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.trainers.online import OnlineTrainer
from tests.checkpoint.test_engine_layouts import CASES, NUM_ITERATIONS


def main(root: Path, names: list[str]) -> None:
    for name in names:
        model, layout = CASES[name]
        overrides = [f"actor.model={root / model / 'policy'}", *layout]
        run(root, [*overrides, "checkpoint.save_minutes=null", f"name={name}-unsaved"])
        saved = [*overrides, "checkpoint.save_interval=1", f"name={name}-saved"]
        run(root, [*saved, f"num_iterations={NUM_ITERATIONS - 1}"])
        run(root, saved)
    platforms.stop()


def run(root: Path, overrides: list[str]) -> None:
    trainer = OnlineTrainer(ExperimentConfig.from_yaml(root / "config.yaml", [f"output_dir={root}", *overrides]))
    trainer.fit()
    trainer.generator.engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
