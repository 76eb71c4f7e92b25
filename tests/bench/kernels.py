"""Attention, norms, activations, rotary embedding, log-probs by our kernels in C and by torch's, one thread, in turns.

    python -m tests.bench.kernels [--rounds 5] [--dtype float32 bfloat16]

Milliseconds of a forward and a backward pass, medians, and how many times as fast ours are. Attention: 4 heads of 64;
GFLOP/s count what lies below the diagonal; prompts are shared. The others: 4,096 tokens of 256, as in the layers of
tests.bench.iteration, and 1,000 rows of 4,096 logits, with a copy of them. A backward pass adds to gradients that are
there.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybridflow.cpu.kernels import library
from hybridflow.cpu.megatron.overlays import prepare
from hybridflow.models import layer_classes as classes_module
from hybridflow.models.attention import PackedSequences
from hybridflow.models.layer_classes import attention_functions, layer_classes
from hybridflow.models.shared_prompt import SharedPrompts
from hybridflow.parallel import vocab
from hybridflow.parallel.vocab import vocab_kernels, vocab_parallel_log_probs
from tests.bench.shared_prompt import cpu

CPU = torch.device("cpu")
HEADS, DIMS, TOKENS, HIDDEN, INNER = 4, 64, 4096, 256, 768
ROWS, VOCABULARY = 1000, 4096
SECONDS = 0.05  # of a measurement, at least
Groups = list[tuple[int, tuple[int, ...]]]
SHAPES: dict[str, tuple[tuple[int, ...], Groups]] = {
    "16 x 192": ((192,) * 16, []),
    "32 x 40": ((40,) * 32, []),
    "2 x 2048": ((2048,) * 2, []),
    "2 prompts of 256, 8 x 64 after each": ((), [(256, (64,) * 8)] * 2),
}


def on_one_thread() -> None:
    """As the trainer prepares a process, with kernels; SystemExit where there are none."""
    if library.why_not() is not None:
        raise SystemExit(f"there are no kernels: {library.why_not()}")
    prepare()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(cpu())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    options = parser.parse_args()
    on_one_thread()
    for name in options.dtype:
        dtype = getattr(torch, name)
        table = Table(title=f"{name}, milliseconds, medians of {options.rounds} rounds")
        for column in ("", "torch", "in C", "times", "torch, backward", "in C, backward", "times", "GFLOP/s in C"):
            table.add_column(column, justify="right")
        for what, work, operations in works(dtype):
            theirs, ours = in_turns(work, options.rounds)
            pairs = [f"{x:.2f}" for a, b in zip(theirs, ours, strict=True) for x in (a, b, a / b)]
            rates = [f"{n / 1e6 / x:.0f}" for n, x in zip(operations, ours, strict=False)]
            table.add_row(what, *pairs, ", ".join(rates))
        Console(width=130).print(table)


def works(dtype: torch.dtype) -> list[tuple[str, Callable[[], Tensor], list[float]]]:
    """(name, a forward pass, operations forward and backward where they are counted)."""
    found = []
    for name, (alone, groups) in SHAPES.items():
        lengths = (*alone, *(prompt for prompt, _ in groups), *(x for _, rest in groups for x in rest))
        shared = SharedPrompts.from_lengths(groups, start=sum(alone), device=CPU) if groups else None
        packed = PackedSequences.from_lengths(lengths, CPU, shared)
        pairs = sum(x * x / 2 for x in lengths) + sum(prompt * sum(rest) for prompt, rest in groups)
        work = bound(
            lambda q, k, v, packed=packed: attention_functions(dtype).attend(q, k, v, packed=packed, scale=DIMS**-0.5),
            dtype,
            3,
            packed,
        )
        found.append((f"attention, {name}", work, [4 * DIMS * HEADS * pairs, 10 * DIMS * HEADS * pairs]))
    hidden, weight = leaf(dtype, TOKENS, 1, HIDDEN), leaf(dtype, HIDDEN)
    found.append(("RMSNorm", lambda: layer_classes().rms_norm.function.apply(hidden, weight, 1e-5), []))
    both = leaf(dtype, TOKENS, 1, 2 * INNER)
    found.append(("SwiGLU", lambda: layer_classes().swiglu.function.apply(both), []))
    heads, angles = leaf(dtype, TOKENS, HEADS, DIMS), torch.randn(TOKENS, 1, DIMS // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found.append(("rotary embedding", lambda: attention_functions(dtype).rotate(heads, cos, sin), []))
    logits, targets = leaf(dtype, ROWS, VOCABULARY), torch.randint(VOCABULARY, (ROWS,))

    def log_probs() -> Tensor:
        group = world_of_one()
        shape = {"vocab_size": VOCABULARY, "temperature": 1.0, "kernels": vocab_kernels()}
        return vocab_parallel_log_probs(logits * 1, targets, group=group, **shape)[0]

    found.append(("log-probs", log_probs, []))
    return found


@functools.cache
def world_of_one() -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def bound(
    function: Callable[..., Tensor], dtype: torch.dtype, count: int, packed: PackedSequences
) -> Callable[[], Tensor]:
    leaves = [leaf(dtype, sum(packed.lengths), HEADS, DIMS) for _ in range(count)]
    return lambda: function(*leaves)


def leaf(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def in_turns(work: Callable[[], Tensor], rounds: int) -> list[list[float]]:
    """Of torch's and of ours, milliseconds forward and backward."""
    found: list[list[tuple[float, float]]] = [[], []]
    for _ in range(rounds + 1):
        with (
            mock.patch.object(classes_module, "library", lambda: None),
            mock.patch.object(vocab, "library", lambda: None),
        ):
            found[0].append(milliseconds(work))
        found[1].append(milliseconds(work))
    return [[statistics.median(column) for column in zip(*each[1:], strict=True)] for each in found]


def milliseconds(work: Callable[[], Tensor]) -> tuple[float, float]:
    out: Any = work()
    grad = torch.ones_like(out)

    def both() -> None:
        work().backward(grad)

    forward = of_one(work)
    return forward, max(of_one(both) - forward, 1e-6)


def of_one(call: Callable[[], Any]) -> float:
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < SECONDS:
        call()
        calls += 1
    return 1e3 * passed / calls


if __name__ == "__main__":
    main()
