"""Runs whose engines have ranks of their own, one after the other.

torchrun --nproc-per-node N -m tests.flows.one_step_off_worker CONFIG {"name": ["section.key=value", ...], ...}
"""

import json
import sys
from pathlib import Path

from hybridflow.config import ExperimentConfig
from hybridflow.errors import Stopped
from hybridflow.parallel import platform as platforms
from hybridflow.trainers.online import OnlineTrainer


def main(config: Path, runs: dict[str, list[str]]) -> None:
    for name, overrides in runs.items():
        trainer = OnlineTrainer(ExperimentConfig.from_yaml(config, [*overrides, f"name={name.partition(' ')[0]}"]))
        try:
            trainer.fit()
        except Stopped as error:
            (Path(trainer.config.output_dir) / f"{name}.{trainer.platform.rank}.txt").write_text(str(error))
        if trainer.generator.engine is not None:
            trainer.generator.engine.close()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
