"""Measures a profile, of few shapes: for tests/automap/profiling/test_measure.py.

python -m tests.automap.profiling.profile_worker OUT, on two ranks
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from hybridflow.automap.profiling import arithmetic, groups
from hybridflow.automap.profiling.measure import measure_profile
from hybridflow.parallel import platform as platforms


def main(out: Path) -> None:
    arithmetic.ROWS = {"cpu": (1, 64)}
    arithmetic.COLUMNS = {"cpu": ((64, 64), (256, 256))}
    arithmetic.GRADIENT_OF = (64,)
    arithmetic.STREAM_BYTES = arithmetic.CACHE_BYTES = {"cpu": 1 << 22}
    groups.SECONDS = 0.02
    told: list[str] = []
    profile = measure_profile("test", tell=told.append)
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, profile.model_dump_json())
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"profiles": every, "told": told}))
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
