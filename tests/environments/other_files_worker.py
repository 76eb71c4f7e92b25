"""`hybridflow.train` whose last rank finds other.jsonl where the config names train.jsonl.

python -m tests.environments.other_files_worker CONFIG [section.key=value ...]
"""

import sys
from pathlib import Path

from hybridflow.data import prompts
from hybridflow.parallel import torchrun
from hybridflow.trainers.online import OnlineTrainer

if __name__ == "__main__":
    opened = prompts.open_files
    rank, world_size = torchrun.torchrun_rank()
    if rank == world_size - 1:
        prompts.open_files = lambda path, key: opened(Path(path).with_name("other.jsonl"), key)
    OnlineTrainer.from_yaml(sys.argv[1], sys.argv[2:])
