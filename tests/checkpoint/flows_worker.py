"""Every flow to its end, from where it is; one trainer after the other.

torchrun --nproc-per-node 2 -m tests.checkpoint.flows_worker CONFIG RUN
"""

import sys
from pathlib import Path

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.trainers.online import OnlineTrainer
from tests.checkpoint.test_flows import FLOWS, SETTINGS


def main(config: Path, run: str) -> None:
    for name, overrides in FLOWS.items():
        trainer = OnlineTrainer(ExperimentConfig.from_yaml(config, [*SETTINGS, *overrides, f"name={name}-{run}"]))
        trainer.fit()
        trainer.generator.engine.close()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
