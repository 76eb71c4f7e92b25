"""What a call of the reshard's kernels costs in Python: tables made for each call, and tables that are kept.

    python -m tests.bench.reshard_calls [--rounds 200] [--json]

On a CPU, with launches that do nothing: neither the kernels nor Triton's own launch are in these times. Pieces are rows
of weights, 128 of each; a weight has a storage of its own, or all are in one storage as with ZeRO-1. Permuted are QKV
weights of 48 heads. Medians in microseconds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hybridflow.reshard import kernel
from hybridflow.reshard.kernel import BY_TRITON, Copy, prepared_copies, prepared_permutation

HEADS, HEAD_ROWS, COLUMNS = 48, 4, 32
ORDER = tuple((7 * i + 3) % HEADS for i in range(HEADS))


class NoKernel:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    for name, times in found.items():
        print(f"{name}: made for each call {times['made']:,.0f} us, kept {times['kept']:,.1f} us")


def measure(rounds: int) -> dict[str, dict[str, float]]:
    with mock.patch.multiple(kernel, copy_kernel=NoKernel(), permute_kernel=NoKernel()):
        copies = {
            f"{number} pieces of {where}": pieces(number, alone=alone)
            for number in (48, 480)
            for where, alone in (("one storage", False), ("as many storages", True))
        }
        found = {name: times(lambda x=x: prepared_copies(x, BY_TRITON), rounds) for name, x in copies.items()}
        stacks = [(x, ORDER) for x in weights(96, HEADS * HEAD_ROWS, alone=True)]
        return found | {"96 weights permuted": times(lambda: prepared_permutation(stacks, BY_TRITON), rounds)}


def times(prepare: Callable[[], Callable[[], object]], rounds: int) -> dict[str, float]:
    kept = prepare()
    return {"made": median(lambda: prepare()(), max(rounds // 10, 3)), "kept": median(kept, rounds)}


def median(work: Callable[[], Any], rounds: int) -> float:
    seconds = []
    work()
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(seconds)


def pieces(number: int, *, alone: bool) -> list[Copy]:
    return list(zip(weights(number, 128, alone=alone), weights(number, 128, alone=alone), strict=True))


def weights(number: int, rows: int, *, alone: bool) -> list[Tensor]:
    if alone:
        return [torch.zeros(rows, COLUMNS, dtype=torch.bfloat16) for _ in range(number)]
    return list(torch.zeros(number * rows, COLUMNS, dtype=torch.bfloat16).split(rows))


if __name__ == "__main__":
    main()
