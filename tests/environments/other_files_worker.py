"""`hybridflow.train` whose last rank finds other.jsonl where the config names train.jsonl.

python -m tests.environments.other_files_worker CONFIG [section.key=value ...]
"""

import sys
from pathlib import Path

from hybridflow.data import inputs
from hybridflow.parallel import torchrun
from hybridflow.trainers.online import OnlineTrainer

if __name__ == "__main__":
    opened = inputs.open_files
    rank, world_size = torchrun.torchrun_rank()
    if rank == world_size - 1:
        inputs.open_files = lambda _, key: opened(str(Path(sys.argv[1]).with_name("other.jsonl")), key)
    OnlineTrainer.from_yaml(sys.argv[1], sys.argv[2:])
