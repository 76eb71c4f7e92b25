"""Kernels and bytes of log-probs, entropies and their gradient over the vocabulary: by torch, and by Triton's kernels.

    python -m tests.bench.log_probs [--rows 8192] [--columns 128256] [--json]

On meta tensors, in bfloat16, in the chunks of rows that a GPU takes. Nothing is computed and no time is taken. A pass
is as many bytes as all logits have in float32. An operator reads what it is given and writes what it returns; a launch
of Triton reads the logits once and, backward, writes them once, as the kernels' grids say.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.parallel import vocab_triton
from hybridflow.parallel.vocab import BY_TRITON, VocabKernels, by_torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=128256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rows, options.columns)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{options.rows:,} rows x {options.columns:,} columns in bfloat16; passes over them in float32")
    for name, counts in found.items():
        print(f"{name}: {counts['kernels']} kernels, {counts['bytes'] / 1e9:.1f} GB, {counts['passes']:.1f} passes")


def measure(rows: int, columns: int) -> dict[str, dict[str, float]]:
    ways = {"by torch": by_torch("cuda"), "by Triton": BY_TRITON}
    found = {}
    for name, kernels in ways.items():
        for direction, work in (("forward", forward), ("backward", backward)):
            counted = Counted()
            with counted, launches(counted):
                work(kernels, rows, columns)
            passes = counted.num_bytes / (4 * rows * columns)
            found[f"{name}, {direction}"] = {
                "kernels": counted.kernels,
                "bytes": counted.num_bytes,
                "passes": round(passes, 2),
            }
    return found


def forward(kernels: VocabKernels, rows: int, columns: int) -> None:
    with torch.device("meta"):
        logits, targets = torch.empty(rows, columns, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
        kernels.partial_sums(logits, columns, targets, torch.empty(rows))


def backward(kernels: VocabKernels, rows: int, columns: int) -> None:
    with torch.device("meta"):
        logits, targets = torch.empty(rows, columns, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
        of_rows = {name: torch.empty(rows) for name in ("normalizer", "entropy", "grad_log_probs", "grad_entropy")}
        kernels.gradients(logits, columns, targets, torch.empty(rows), **of_rows)


class Counted(TorchDispatchMode):
    """Operators that compute or move something, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in NOTHING):
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            if func.overloadpacket in WRITES_ALONE:
                read = read[1:]
            if func.overloadpacket in ONE_A_ROW:
                read, written = [x for x in read if x.dim() == 1 or x.shape[1] == 1], []
            self.add(sum(x.nbytes for x in read) + sum(x.nbytes for x in written))
        return out

    def add(self, num_bytes: int) -> None:
        self.kernels += 1
        self.num_bytes += num_bytes


NOTHING = (torch.ops.aten.empty, torch.ops.aten.new_empty)
WRITES_ALONE = (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)  # what they are given to write over
ONE_A_ROW = (torch.ops.aten.gather, torch.ops.aten.scatter_add_)  # of the logits they touch one element a row


def launches(counted: Counted) -> Any:
    """The kernels of Triton, which count their bytes in the place of running."""

    def counting(passes_of_logits: int) -> Any:
        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(logits: Tensor, *others: Any, **named: Any) -> None:
                    of_rows = sum(x.nbytes for x in (*others, *named.values()) if isinstance(x, Tensor))
                    counted.add(passes_of_logits * logits.nbytes + of_rows)

                return launch

        return Kernel()

    return mock.patch.multiple(vocab_triton, sums_kernel=counting(1), gradients_kernel=counting(2))


if __name__ == "__main__":
    main()
