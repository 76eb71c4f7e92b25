"""Matrix products of one thread by torch's own library and by what else there is, in turns, GFLOP/s and ratios.

    python -m tests.bench.products [--rounds 5] [--tokens 4096]

The three products of a linear layer, float32, of the layers of tests.bench.iteration: output, gradient of the input,
gradient of the weight; by MKL as torch calls it, by oneDNN, and by the CPU's matrix units where it has them. The first
line says which of these hybridflow takes on this machine. Then what a number of tokens costs that has not come before:
oneDNN, which multiplies all bfloat16, compiles a kernel for each (so micro-batches are filled up to few of them).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybridflow.cpu.kernels.matrix import has_units
from hybridflow.cpu.kernels.matrix import product as by_units
from hybridflow.cpu.megatron import products
from tests.bench.shared_prompt import cpu

LAYERS = ((256, 512), (256, 1536), (768, 256), (256, 4096), (1024, 4096))  # inputs, outputs
SECONDS = 0.1  # of a measurement, at least
SEEN, UNSEEN = 1500, range(1501, 2000)  # tokens
Pair = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 256, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    taken = "matrix units" if has_units() else "oneDNN" if products.mkl_is_slow() else "torch's own"
    print(f"{cpu()}; float32 is multiplied by: {taken}")
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": torch.mm, "oneDNN": products.product}
    if has_units():
        ways["matrix units"] = by_units
    table = Table(title="GFLOP/s, medians; times torch's")
    for column in ("tokens x inputs x outputs", "product", *ways):
        table.add_column(column, justify="right")
    for tokens in options.tokens:
        for inputs, outputs in LAYERS:
            for name, pair in pairs(tokens, inputs, outputs, torch.float32).items():
                first, *others = rates(pair, list(ways.values()), options.rounds)
                cells = (f"{first:.0f}", *(f"{rate:.0f}, {rate / first:.2f}" for rate in others))
                shape = f"{tokens} x {inputs} x {outputs}"
                table.add_row(shape, name, *cells, end_section=name == "weight's gradient")
    Console(width=110).print(table)
    print_new_shapes()


def pairs(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, Pair]:
    shapes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    x, weight, grad = (torch.randn(*shape).to(dtype) for shape in shapes)
    return {"output": (x, weight.t()), "input's gradient": (grad, weight), "weight's gradient": (grad.t(), x)}


def rates(pair: Pair, ways: Sequence[Callable[[Tensor, Tensor], Tensor]], rounds: int) -> list[float]:
    a, b = pair
    work = 2 * a.shape[0] * a.shape[1] * b.shape[1] / 1e9
    found = [[work / seconds(lambda way=way: way(a, b)) for way in ways] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def seconds(call: Callable[[], Tensor]) -> float:
    """Of one call."""
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < SECONDS:
        call()
        calls += 1
    return passed / calls


def print_new_shapes() -> None:
    table = Table(title=f"about {SEEN} tokens x 256 x 768 by torch, milliseconds, means of 50 products")
    for column in ("type", "product", "a number that came before", "one that did not"):
        table.add_column(column, justify="right")
    unseen = random.Random(0).sample(UNSEEN, 50)
    for dtype in (torch.float32, torch.bfloat16):
        for name in pairs(1, 256, 768, dtype):
            of(SEEN, name, dtype)
            times = (sum(of(tokens, name, dtype) for tokens in numbers) for numbers in ([SEEN] * 50, unseen))
            table.add_row(str(dtype).removeprefix("torch."), name, *(f"{1e3 * x / 50:.2f}" for x in times))
    Console(width=110).print(table)


def of(tokens: int, name: str, dtype: torch.dtype) -> float:
    """Seconds of one product."""
    a, b = pairs(tokens, 256, 768, dtype)[name]
    begin = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
