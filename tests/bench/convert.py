"""Conversion against a plain copy of the same bytes on the same disk, side by side in one run; and peak memory.

    python -m tests.bench.convert [--directory DIR] [--layers 30] [--rounds 3]

The checkpoint is a Llama in bfloat16 with random weights, made from a config: 0.26 GB and 0.13 GB a layer. The copies
and both directions take turns; each ends when its bytes are on the disk. A conversion is measured as a user waits for
it, python's start included. Seconds are medians over the rounds. DIR needs room for three checkpoints.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.tools.convert.large import CONFIG, make_large, peak_memory

DIRECTIONS = {"hf-to-megatron": ("source", "megatron"), "megatron-to-hf": ("megatron", "back")}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        total, largest = make_large(directory / "source", CONFIG | {"num_hidden_layers": options.layers})
        copies: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        seconds: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
        peaks = dict.fromkeys(DIRECTIONS, 0)
        for _ in range(options.rounds):
            for direction, (source, target) in DIRECTIONS.items():
                copies[direction].append(timed(lambda source=source: copy(directory / source, directory / "copy")))
                shutil.rmtree(directory / "copy")
                shutil.rmtree(directory / target, ignore_errors=True)
                arguments = (direction, directory / source, directory / target)
                started = time.perf_counter()
                peaks[direction] = max(peaks[direction], peak_memory(*arguments))
                seconds[direction].append(time.perf_counter() - started)
    report(total, largest, copies=copies, seconds=seconds, peaks=peaks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure (default: the system's)")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def copy(source: Path, target: Path) -> None:
    """Every file, and have it on the disk."""
    shutil.copytree(source, target)
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def report(
    total: int,
    largest: int,
    *,
    copies: dict[str, list[float]],
    seconds: dict[str, list[float]],
    peaks: dict[str, int],
) -> None:
    table = Table(title=f"{total / 1e9:.2f} GB, the largest tensor {largest / 1e6:.0f} MB", title_justify="left")
    for i, column in enumerate(("", "copy, s", "conversion, s", "ratio", "peak memory, MB", "allowed, MB")):
        table.add_column(column, justify="right" if i else "left")
    for direction, peak in peaks.items():
        copied, converted = statistics.median(copies[direction]), statistics.median(seconds[direction])
        table.add_row(
            direction,
            f"{copied:.1f}",
            f"{converted:.1f}",
            f"{converted / copied:.2f}",
            f"{peak / 1e6:.0f}",
            f"{(3 * largest + (1 << 30)) / 1e6:.0f}",
        )
    Console(width=112).print(table)


if __name__ == "__main__":
    main()
