"""On Python's path, where every start imports it: a rank of hybridflow.train becomes a process that only waits.

The launcher starts ranks, tells them signals and sees them end, whatever they compute. These need no torch and no
store, so that a test of the launcher does not take the time in which three hosts import all of both.

Rank 0 writes what a run leaves behind: run/config.yaml, a metrics.csv of an iteration, and a checkpoint when it is told
to end. A rank that is told ends with 75, as one that has saved, for which it takes SAVE_SECONDS.
"""

import json
import os
import pathlib
import signal
import sys
import time

SECONDS = 600.0  # that one lives, should nobody end it


def wait() -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    rank, run = os.environ["RANK"], pathlib.Path("run")
    written = pathlib.Path(f"writes_{rank}.json")
    written.write_text(json.dumps(dict(os.environ)))
    written.rename(f"rank_{rank}.json")  # whole as soon as it is there
    if rank == "0":
        run.mkdir(exist_ok=True)
        (run / "config.yaml").write_text("")
        (run / "metrics.csv").write_text("iteration\n1\n2\n")
        print("iteration 2/100000", flush=True)
    end = time.monotonic() + SECONDS
    while not told and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(float(os.environ.get("SAVE_SECONDS", 0)))
    if rank == "0":
        (run / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
    os._exit(75 if told else 1)


if "RANK" in os.environ and "hybridflow.train" in sys.orig_argv:
    wait()
