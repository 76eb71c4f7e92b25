"""Events of the first of two ranks, few and many, on both: python -m tests.rollout.turns_worker OUT, on two ranks."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from hybridflow.parallel import platform as platforms
from hybridflow.rollout.rows import TurnEvent
from hybridflow.rollout.turns import SLOTS, LeaderBroadcast

LONG = TurnEvent(3, tuple(range(2 * SLOTS)), 7)
LISTS = (
    [],
    [
        TurnEvent(0, (5, 6), 9),
        TurnEvent(2, ends=True, truncated=True),
        TurnEvent(1, ends=True, failed=True),
        TurnEvent(5, drops=True),
    ],
    [TurnEvent(1, (7, 8), 3, branch=2), TurnEvent(1, drops=True, branch=1)],
    [LONG, TurnEvent(4, (1,), 2)],
    [TurnEvent(row, (row,) * row, row) for row in range(60)],
    [],
)


def main(out: Path) -> None:
    platform = platforms.start(seed=0)
    agreement = LeaderBroadcast(dist.group.WORLD, 1)
    own = LISTS if platform.rank == 1 else [()] * len(LISTS)
    found = [[asdict(event) for event in agreement.on_all(events)] for events in own]
    everyone: list = [None, None]
    dist.all_gather_object(everyone, found)
    if platform.rank == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
