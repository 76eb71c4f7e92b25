"""Milliseconds of exchanging gradients and parameters on CPUs, beside gloo's functions: medians of the slowest rank.

    torchrun --nproc-per-node 2 -m tests.bench.flat_buffers [--elements 5242880] [--rounds 25]

A reduce-scatter of so many float32 numbers and an all-gather, each within one buffer, as megatron's optimizer calls
them; the ways in turn.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybridflow.cpu.megatron import overlays
from hybridflow.parallel import platform as platforms

MS = 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=5 << 20, help="of the whole buffer; rounded up to the ranks")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    platform = platforms.start(seed=0, platform="cpu")
    group = dist.new_group()
    size = -(-options.elements // platform.world_size)
    whole = torch.zeros(size * platform.world_size)
    own = whole[size * platform.rank :][:size]
    named, total = {"group": group, "async_op": False}, dist.ReduceOp.SUM
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "reduce-scatter": (
            lambda: dist.reduce_scatter_tensor(own, whole, op=total, **named),
            lambda: overlays.reduce_scatter_tensor(own, whole, op=total, **named),
        ),
        "all-gather": (
            lambda: dist.all_gather_into_tensor(whole, own, **named),
            lambda: overlays.all_gather_into_tensor(whole, own, **named),
        ),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(options.rounds + 1):
        for name, pair in ways.items():
            seconds[name].append([timed(way, group) for way in pair])
    if platform.rank == 0:
        title = (
            f"{platform.world_size} ranks, {4e-6 * whole.numel():.0f} MB: milliseconds, load {os.getloadavg()[0]:.1f}"
        )
        table = Table(title=title)
        for column in ("", "gloo", "ours", "ours / gloo"):
            table.add_column(column, justify="right" if column else "left")
        for name, rows in seconds.items():
            theirs, ours = (statistics.median(row[i] for row in rows[1:]) for i in range(2))
            table.add_row(name, f"{theirs * MS:.1f}", f"{ours * MS:.1f}", f"{ours / theirs:.2f}")
        Console(width=100).print(table)
    platforms.stop()


def timed(way: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Of the slowest rank, from a barrier on."""
    dist.barrier(group)
    started = time.perf_counter()
    way()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return float(seconds)


if __name__ == "__main__":
    main()
