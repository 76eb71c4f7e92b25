"""Matrix products of one thread by torch's own library and by oneDNN, in turns, GFLOP/s and their ratio.

    python -m tests.bench.products [--rounds 5] [--tokens 4096]

The three products of a linear layer, float32, of the layers of tests.bench.iteration: output, gradient of the input,
gradient of the weight. `used` says whether hybridflow takes oneDNN on this machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybridflow.parallel import products
from tests.bench.shared_prompt import cpu

LAYERS = ((256, 512), (256, 1536), (768, 256), (256, 4096), (1024, 4096))  # inputs, outputs
SECONDS = 0.1  # of a measurement, at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 256, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{cpu()}; oneDNN is used: {'yes' if products.mkl_is_slow() else 'no'}")
    table = Table(title="GFLOP/s, medians")
    for column in ("tokens x inputs x outputs", "product", "torch", "oneDNN", "ratio"):
        table.add_column(column, justify="right")
    for tokens in options.tokens:
        for inputs, outputs in LAYERS:
            x, weight, grad = (torch.randn(*s) for s in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
            pairs = {"output": (x, weight.t()), "input's gradient": (grad, weight), "weight's gradient": (grad.t(), x)}
            for name, pair in pairs.items():
                usual, ours = rates(pair, options.rounds)
                cells = (f"{tokens} x {inputs} x {outputs}", name, f"{usual:.0f}", f"{ours:.0f}", f"{ours / usual:.2f}")
                table.add_row(*cells, end_section=name == "weight's gradient")
    Console(width=90).print(table)


def rates(pair: tuple[Tensor, Tensor], rounds: int) -> tuple[float, float]:
    a, b = pair
    work = 2 * a.shape[0] * a.shape[1] * b.shape[1] / 1e9
    ways: tuple[Callable[[], Tensor], ...] = (lambda: a @ b, lambda: products.product(a, b))
    found = [[work / seconds(way) for way in ways] for _ in range(rounds + 1)][1:]
    usual, ours = (statistics.median(column) for column in zip(*found, strict=True))
    return usual, ours


def seconds(way: Callable[[], Tensor]) -> float:
    """Of one call."""
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < SECONDS:
        way()
        calls += 1
    return passed / calls


if __name__ == "__main__":
    main()
