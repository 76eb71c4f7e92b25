"""The engine's attention on one thread of a CPU by our kernel in C and by vLLM's, in turns.

    python -m tests.bench.engine_attention [--rounds 9] [--dtype float32 bfloat16]

Microseconds a layer, medians: writing new keys and values into the cache, and attention over it. As in an engine, five
layers with caches of their own follow each other, so that what they read has left the processor's caches where it is
much.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybridflow.architecture.mixers.attention import CPU_BLOCK
from hybridflow.cpu.kernels import library, paged
from hybridflow.cpu.megatron.overlays import prepare
from hybridflow.rollout.patches import prepare_vllm
from tests.bench.shared_prompt import cpu

LAYERS, BLOCK, SCALE = 5, CPU_BLOCK, 0.1


@dataclass(frozen=True)
class Shape:
    """Of a step: sequences, their tokens with the last `new`, which are the queries, and the heads; of how many
    samples each prompt has, and how many tokens of it lie in the same blocks for all of them."""

    sequences: int
    length: int
    new: int
    heads: int
    kv_heads: int
    dims: int
    samples: int = 1
    shared: int = 0

    def __str__(self) -> str:
        what = "next tokens" if self.new == 1 else "prompts"
        heads = f"{self.heads} heads on {self.kv_heads} of {self.dims}"
        prompts = f", {self.shared} of {self.samples} shared" if self.shared else ""
        return f"{what}, {self.sequences} x {self.length}{prompts}, {heads}"


SHAPES = (
    Shape(32, 130, 1, 4, 4, 64),
    Shape(32, 130, 1, 4, 4, 64, samples=8, shared=64),
    Shape(32, 320, 1, 4, 4, 64, samples=8, shared=256),
    Shape(8, 130, 1, 4, 4, 64),
    Shape(32, 130, 1, 8, 2, 64),
    Shape(32, 1024, 1, 32, 8, 128),
    Shape(32, 1024, 1, 32, 8, 128, samples=8, shared=512),
    Shape(32, 64, 64, 4, 4, 64),
    Shape(4, 1024, 1024, 8, 2, 64),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured, after one that is not")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    options = parser.parse_args()
    if library.why_not() is not None:
        raise SystemExit(f"there are no kernels: {library.why_not()}")
    prepare()
    prepare_vllm()
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    print(cpu())
    for name in options.dtype:
        table = Table(title=f"{name}, microseconds a layer, medians of {options.rounds} rounds")
        for column in ("", "vLLM, write", "in C", "times", "vLLM, attention", "in C", "times"):
            table.add_column(column, justify="right")
        for shape in SHAPES:
            times = in_turns(shape, getattr(torch, name), options.rounds)
            pairs = [f"{x:.1f}" for a, b in zip(*times, strict=True) for x in (a, b, a / b)]
            table.add_row(str(shape), *pairs)
        Console(width=130).print(table)


def in_turns(shape: Shape, dtype: torch.dtype, rounds: int) -> list[list[float]]:
    """Of vLLM's and of ours, microseconds of writing and of attention."""
    step = Step(shape, dtype)
    works = [[step.their_write, step.their_attention], [step.our_write, step.our_attention]]
    found: list[list[list[float]]] = [[[], []], [[], []]]
    for _ in range(rounds + 1):
        for whose, pair in enumerate(works):
            for which, work in enumerate(pair):
                found[whose][which].append(microseconds_a_layer(work, step.caches))
    return [[statistics.median(column[1:]) for column in each] for each in found]


def microseconds_a_layer(work: Callable[[Tensor], None], caches: list[Tensor]) -> float:
    begin = time.perf_counter()
    for cache in caches:
        work(cache)
    return 1e6 * (time.perf_counter() - begin) / len(caches)


class Step:
    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        from vllm import _custom_ops as ops

        self._ops, blocks = ops, -(-shape.length // BLOCK)
        count = shape.sequences * blocks
        self.caches = [torch.zeros(count, shape.kv_heads, BLOCK, 2 * shape.dims, dtype=dtype) for _ in range(LAYERS)]
        self._table = torch.arange(count, dtype=torch.int32).view(shape.sequences, blocks)
        prompts = self._table.view(-1, shape.samples, blocks)[:, :, : shape.shared // BLOCK]
        prompts.copy_(prompts[:, :1].clone())
        self._lengths = torch.full((shape.sequences,), shape.length, dtype=torch.int32)
        self._starts = torch.arange(shape.sequences + 1, dtype=torch.int32) * shape.new
        heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        made = torch.randn(shape.sequences * shape.new, sum(heads), shape.dims).to(dtype)
        self._query, self._key, self._value = made.split(heads, 1)
        places = torch.arange(shape.length - shape.new, shape.length)
        self._slots = (self._table[:, places // BLOCK].long() * BLOCK + places % BLOCK).flatten()
        self._out, self._longest = torch.empty_like(self._query.contiguous()), shape.length
        self._plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=shape.sequences,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.dims,
            seq_lens=self._lengths,
            dtype=dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa="vec",
            enable_kv_split=True,
        )

    def our_write(self, cache: Tensor) -> None:
        paged.store(self._key, self._value, cache, self._slots)

    def our_attention(self, cache: Tensor) -> None:
        paged.attend(
            self._query,
            cache,
            self._out,
            table=self._table,
            starts=self._starts,
            lengths=self._lengths,
            longest=self._longest,
            scale=SCALE,
        )

    def their_write(self, cache: Tensor) -> None:
        self._ops.cpu_attn_reshape_and_cache(self._key, self._value, *_halves(cache), self._slots, "vec")

    def their_attention(self, cache: Tensor) -> None:
        keys, values = _halves(cache)
        self._ops.cpu_attention_with_kv_cache(
            query=self._query,
            key_cache=keys,
            value_cache=values,
            output=self._out,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=SCALE,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0,
            scheduler_metadata=self._plan,
            s_aux=None,
        )


def _halves(cache: Tensor) -> tuple[Tensor, ...]:
    """As vLLM's CPU attention cuts a layer's cache."""
    blocks, kv_heads, size, _ = cache.shape
    return cache.view(blocks, kv_heads, 2 * size, -1).chunk(2, dim=2)


if __name__ == "__main__":
    main()
