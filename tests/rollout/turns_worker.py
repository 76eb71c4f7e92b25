"""Replies of the first of two ranks, few and many, on both: python -m tests.rollout.turns_worker OUT, on two ranks."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.parallel import platform as platforms
from hybridflow.rollout.turns import SLOTS, LeaderBroadcast, TurnEvent

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
    agreement = LeaderBroadcast(dist.group.WORLD, 1, torch.device("cpu"))
    own = LISTS if platform.rank == 1 else [()] * len(LISTS)
    found = [[asdict(reply) for reply in agreement.on_all(replies)] for replies in own]
    numbers = agreement.numbers([3, 1, 2] if agreement.leads else [], 3)
    everyone: list = [None, None]
    dist.all_gather_object(everyone, [found, numbers])
    if platform.rank == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
