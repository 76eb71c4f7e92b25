"""A rank that tells who it is, and waits for ever or fails.

torchrun --nproc-per-node 2 -m tests.launch_worker DIRECTORY [RANK_THAT_FAILS]
"""

import os
import sys
import time
from pathlib import Path


def rank_waits_here() -> None:
    time.sleep(6000)


if __name__ == "__main__":
    directory, rank = Path(sys.argv[1]), os.environ["RANK"]
    (directory / f"{rank}.new").write_text(f"{os.getpid()} {hash('a set of strings has an order')}")
    (directory / f"{rank}.new").rename(directory / rank)
    if rank in sys.argv[2:]:
        while len(list(directory.iterdir())) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        raise RuntimeError("this rank fails")
    rank_waits_here()
