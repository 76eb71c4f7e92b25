"""Every flow for four iterations, and again from the checkpoint after the second; one trainer after the other.

torchrun --nproc-per-node 2 -m tests.checkpoint.flows_worker CONFIG
"""

import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from hybridflow.checkpoint.store import step_name
from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.trainer import RLTrainer
from tests.checkpoint.test_flows import FLOWS, NUM_ITERATIONS, SETTINGS


def main(config: Path) -> None:
    for name, overrides in FLOWS.items():
        fit(config, f"{name}-undisturbed", overrides)
        if dist.get_rank() == 0:
            again = shutil.copytree(config.parent / f"{name}-undisturbed", config.parent / f"{name}-again")
            shutil.rmtree(again / "checkpoints" / step_name(NUM_ITERATIONS))
        dist.barrier()
        fit(config, f"{name}-again", overrides)
    platforms.stop()


def fit(config: Path, name: str, overrides: list[str]) -> None:
    trainer = RLTrainer(ExperimentConfig.from_yaml(config, [*SETTINGS, *overrides, f"name={name}"]))
    trainer.fit()
    trainer.generator.engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
