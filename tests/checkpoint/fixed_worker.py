"""Every flow on fixed data to its end, from where it is; one trainer after the other.

torchrun --nproc-per-node 2 -m tests.checkpoint.fixed_worker DIRECTORY RUN
"""

import sys
from pathlib import Path

from hybridflow.fixed_config import FixedDataConfig
from hybridflow.fixed_trainer import FixedDataTrainer
from hybridflow.parallel import platform as platforms
from tests.checkpoint.test_fixed import FLOWS


def main(directory: Path, run: str) -> None:
    for name in FLOWS:
        config = FixedDataConfig.from_yaml(directory / f"{name}.yaml", [f"name={name}-{run}"])
        FixedDataTrainer(config).fit()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
