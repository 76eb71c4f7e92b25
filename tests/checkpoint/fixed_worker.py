"""Every flow on fixed data to its end, from where it is; one trainer after the other.

torchrun --nproc-per-node 2 -m tests.checkpoint.fixed_worker DIRECTORY RUN
"""

import sys
from pathlib import Path

from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.trainers.fixed_data import FixedDataTrainer
from tests.checkpoint.test_fixed import ENDINGS, FLOWS, PLACES


def main(directory: Path, run: str) -> None:
    for name in PLACES if run == "killed" else FLOWS:
        config = FixedDataConfig.from_yaml(directory / f"{name}.yaml", [f"name={name}-{run}"])
        FixedDataTrainer(config).fit()
    if run == "killed":
        for name, overrides in ENDINGS:
            if torchrun.torchrun_rank()[0] == 0:
                print(f"---- {name}", flush=True)
            FixedDataTrainer(FixedDataConfig.from_yaml(directory / "sft.yaml", [f"name={name}", *overrides])).fit()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
