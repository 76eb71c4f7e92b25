"""The linear layers of one step of the engine, on a CPU, by torch and by our kernel in C, in turns.

    python -m tests.bench.few_rows [--rounds 30] [--dtype float32 bfloat16] [--threads 1]

All weights of the models of tests.bench.iteration, and of one wide layer, one after the other as in a step that
decodes: milliseconds, medians, and how fast the kernel reads the weights. Between two measurements other memory is
written, as much as in a step (--between), so that not all weights are still in the processor's caches. `used` says up
to how many rows the engine takes the kernel for a model on this machine.
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybridflow.cpu.engine.kernels import most_rows
from hybridflow.cpu.kernels.linear import linear
from tests.bench.iteration import SIZES, VOCAB_SIZE
from tests.bench.kernels import on_one_thread

MODELS = SIZES | {"wide": (2048, 5504, 1, 16)}
WAYS = (torch.nn.functional.linear, linear)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measured, after one that is not")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--between", type=int, default=16, help="MB that are written between two measurements")
    parser.add_argument("--size", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    on_one_thread()
    torch.set_num_threads(options.threads)
    between = torch.zeros(options.between << 18)
    for name in options.dtype:
        dtype = getattr(torch, name)
        table = Table(title=f"{name}, milliseconds a step, {options.threads} threads")
        for column in ("model", "used", "rows", "torch", "in C", "times", "GB/s", "GFLOP/s"):
            table.add_column(column, justify="right")
        for size in options.size:
            weights = layers(size, dtype)
            count = sum(w.numel() for w in weights)
            for rows in options.rows:
                theirs, ours = in_turns(weights, rows, between, options.rounds)
                speeds = (count * dtype.itemsize / ours / 1e9, 2 * rows * count / ours / 1e9)
                cells = (
                    f"{1e3 * theirs:.2f}",
                    f"{1e3 * ours:.2f}",
                    f"{theirs / ours:.2f}",
                    *(f"{x:.0f}" for x in speeds),
                )
                used = str(most_rows(dtype, MODELS[size][0]))
                table.add_row(size, used, str(rows), *cells, end_section=rows == options.rows[-1])
        Console(width=90).print(table)


def layers(size: str, dtype: torch.dtype) -> list[Tensor]:
    """In the order of a step, in one piece of memory, as the trainer has them."""
    hidden, ffn, num_layers, _ = MODELS[size]
    shapes = [(3 * hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)] * num_layers
    shapes.append((VOCAB_SIZE, hidden))
    flat = torch.randn(sum(a * b for a, b in shapes)).to(dtype)
    return [w.view(shape) for w, shape in zip(flat.split([a * b for a, b in shapes]), shapes, strict=True)]


def in_turns(weights: list[Tensor], rows: int, between: Tensor, rounds: int) -> list[float]:
    """Seconds of all products, by each way."""
    inputs = {size: torch.randn(rows, size).to(weights[0].dtype) for size in {w.shape[1] for w in weights}}
    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for way, found in zip(WAYS, times, strict=True):
            between.add_(1)
            begin = time.perf_counter()
            for weight in weights:
                way(inputs[weight.shape[1]], weight)
            found.append(time.perf_counter() - begin)
    return [statistics.median(found[1:]) for found in times]


if __name__ == "__main__":
    main()
