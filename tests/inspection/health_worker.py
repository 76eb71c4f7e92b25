"""A rank of eight on four hosts by torchrun's names, each with a directory of its own: three health checks in a row.

tests.launch.run_ranks(8, "tests.inspection.health_worker", DIRECTORY)    DIRECTORY/node-a/ and so on are the hosts'
"""

import json
import os
import sys
import time
from pathlib import Path

from hybridflow.cli import health
from hybridflow.inspection import examination, participant, storage

RANKS_PER_HOST = 2
NAMES = ("node-a", "node-b", "node-c", "node-d")


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    node = rank // RANKS_PER_HOST
    os.environ |= {"GROUP_RANK": str(node), "LOCAL_RANK": str(rank % RANKS_PER_HOST)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS_PER_HOST), "HYBRIDFLOW_HOST": NAMES[node]}
    os.chdir(directory / NAMES[node])
    overrides = ["algorithm.update.mini_batch_size=8", "data.prompts_per_iteration=8"]
    check(directory, rank, "inputs", lambda: health.run("config.yaml", overrides))
    participant_device = participant.this_device
    examination.ANSWER_SECONDS, storage.MOST_BYTES = 8.0, 4 << 20
    if rank == 3:
        participant.this_device = lambda local: time.sleep(14) or participant_device(local)
    check(directory, rank, "late", health.run)
    participant.this_device = participant_device
    if rank != 5:
        examination.GREET_SECONDS = 20.0  # rank 3 is still busy with the check before
        check(directory, rank, "absent", health.run)


def check(directory: Path, rank: int, name: str, run) -> None:
    report = run()
    (directory / f"{name}.{rank}.json").write_text(json.dumps(report.as_dict(), sort_keys=True))


if __name__ == "__main__":
    main()
