"""Seconds of an optimizer step whose state lies in host memory, by a simulated clock of the copies. Runs nothing else.

    python -m tests.bench.staged_step [--gib 42.7] [--link 50] [--memory 2000]

The lanes are those of the step (`hybridflow.parallel.lanes.in_two_slots`); each takes as long as its bytes say. Beside
it: one part after the other, and what `offload_optimizer: true` moves in an iteration.
"""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridflow.parallel.host_memory import GIB, PART_BYTES, part_blocks
from hybridflow.parallel.lanes import Lane, Lanes, in_two_slots


class ClockLanes(Lanes):
    """Work says how many seconds it takes; a lane does one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.free: dict[Lane, float] = {"in": 0.0, "compute": 0.0, "out": 0.0}

    def run(self, lane: Lane, work: Callable[[], Any] | None = None, *, after: Iterable[Any] = ()) -> float:
        begin = max([self.free[lane], *after])
        self.free[lane] = begin + (0.0 if work is None else work())
        return self.free[lane]


def step_seconds(parts: int, copy: float, step: float) -> float:
    """Of parts that take `copy` seconds each way and `step` seconds of computing."""
    lanes = ClockLanes()
    in_two_slots(lanes, parts, lambda number: copy, lambda number: step, lambda number: copy)
    return lanes.free["compute"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=42.7, help="of a rank's state: of Qwen3-30B-A3B on 8 GPUs")
    parser.add_argument("--link", type=float, default=50.0, help="GB/s between host and device, each way")
    parser.add_argument("--memory", type=float, default=2000.0, help="GB/s of the device's memory")
    options = parser.parse_args()
    parts, size = part_blocks(int(options.gib * GIB))
    copy, step = size / options.link / 1e9, 2 * size / options.memory / 1e9  # read and written
    table = Table(title=f"{options.gib} GiB in {parts} parts of {PART_BYTES >> 20} MiB")
    table.add_column("")
    table.add_column("s", justify="right")
    for name, seconds in (
        ("whole step, state on the device", parts * step),
        ("in two slots", step_seconds(parts, copy, step)),
        ("one part after the other", parts * (2 * copy + step)),
        ("there and back once: offload_optimizer: true, an iteration", 2 * parts * copy),
    ):
        table.add_row(name, f"{seconds:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
