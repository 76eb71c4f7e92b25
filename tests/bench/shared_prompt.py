"""Seconds of scoring and of an update, and what the update keeps for its backward pass, where samples share a prompt.

    torchrun --nproc-per-node 1 -m tests.bench.shared_prompt [--shapes 8x8x64x128 8x8x256x64] [--dtype float32 bfloat16]

A shape is prompts x samples x prompt tokens x response tokens. The same rows are run twice in turn, in one process: as
samples of their prompts, and as if each answered a prompt of its own. Numbers are medians. On a CPU seconds are those
that the process has computed, so that other work on the machine counts less. Bytes are of all tensors that autograd
keeps, weights left out, with every token of the batch in one micro-batch.
"""

import argparse
import platform as machine
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybridflow.batch import PerToken, RolloutBatch, response_mask
from hybridflow.config import ExperimentConfig
from hybridflow.models.micro_batch import padding, prediction_micro_batches
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import PolicyObjective
from hybridflow.roles.policy import Actor
from tests.bench import iteration
from tests.distributed.given import given_roles

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
REINFORCE = PolicyObjective(lambda log_probs, entropy, tokens: (-log_probs * tokens.advantages, {}))


@dataclass(frozen=True)
class Batch(RolloutBatch):
    advantages: PerToken


def main() -> None:
    options = parse()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    longest = max(prompt + response for _, _, prompt, response in shapes)
    with iteration.inputs([options.size], iteration.Shape(1, longest, 0, 1)) as directory:
        print(cpu())
        for dtype in options.dtype:
            actor = build(directory / options.size, dtype, max(n * m * (p + r) for n, m, p, r in shapes))
            table = Table(title=f"{options.size}, {dtype}, {torch.get_num_threads()} threads")
            for column in ("shape", "", "tokens run", "log_probs s", "update s", "kept MB"):
                table.add_column(column, justify="right")
            for shape in shapes:
                rows(table, actor, make_batch(*shape, ragged=options.ragged), "x".join(map(str, shape)), options.rounds)
            Console(width=110).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8x8x64x128", "8x8x256x64"])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--size", choices=iteration.SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--ragged", action="store_true", help="lengths between a quarter and all of those given")
    return parser.parse_args()


def cpu() -> str:
    """What lscpu says of it, as far as it decides the speed."""
    if machine.system() != "Linux":
        return machine.processor()
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    known = {name.strip(): value.strip() for name, _, value in lines}
    load = Path("/proc/loadavg").read_text().split()[0]
    flags = [flag for flag in FLAGS if flag in known.get("flags", "").split()]
    return f"{known.get('model name')}, {' '.join(flags)}; load {load}"


def build(directory: Path, dtype: str, max_tokens: int) -> Actor:
    config = iteration.config(directory, dtype, iteration.Shape(1, 1, 1, 1), 1, 1)
    tree = config.model_dump() | {"critic": None, "reference": None}
    tree["algorithm"] = {"name": "grpo", "kl": {"use": "none"}}
    tree["sampling"]["samples_per_prompt"] = 2
    tree["actor"]["micro_batch_tokens"] = max_tokens
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), 1 << 26)
    return given_roles(ExperimentConfig.model_validate(tree), world).actor


def make_batch(num_prompts: int, num_samples: int, prompt: int, response: int, *, ragged: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def lengths(size: int, count: int) -> Tensor:
        return (
            torch.randint(size // 4, size + 1, (count,), generator=generator) if ragged else torch.full((count,), size)
        )

    prompts = lengths(prompt, num_prompts).repeat_interleave(num_samples)
    sizes = prompts + lengths(response, len(prompts))
    ids = torch.randint(0, iteration.VOCAB_SIZE, (num_prompts, prompt), generator=generator)
    pieces = [
        torch.cat([ids[row // num_samples, :p], torch.randint(0, iteration.VOCAB_SIZE, (n - p,), generator=generator)])
        for row, (p, n) in enumerate(zip(prompts.tolist(), sizes.tolist(), strict=True))
    ]
    tokens = torch.cat(pieces)
    mask = response_mask(sizes, prompts)
    return Batch(
        input_ids=tokens,
        lengths=sizes,
        prompt_lengths=prompts,
        prompt_indices=torch.arange(len(sizes)) // num_samples,
        truncated=torch.zeros(len(sizes), dtype=torch.bool),
        response_mask=mask,
        rollout_log_probs=torch.zeros(len(tokens)),
        advantages=torch.randn(len(tokens), generator=generator) * mask,
    )


def rows(table: Table, actor: Actor, shared: Batch, name: str, rounds: int) -> None:
    """One for copies of the prompt and one for a shared prompt, and the ratios of the two."""
    batches = {"copies": replace(shared, prompt_indices=torch.arange(len(shared))), "shared": shared}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in batches}
    for _ in range(rounds + 1):
        for kind, batch in batches.items():
            found[kind].append((seconds(lambda b=batch: actor.log_probs(b)), seconds(lambda b=batch: update(actor, b))))
    numbers = {}
    for kind, batch in batches.items():
        scoring, updating = (statistics.median(column) for column in zip(*found[kind][1:], strict=True))
        numbers[kind] = (tokens_run(batch), scoring, updating, kept_bytes(lambda b=batch: update(actor, b)) / 1e6)
        table.add_row(name, kind, *map("{:.4g}".format, numbers[kind]))
    ratios = [a / b for a, b in zip(numbers["copies"], numbers["shared"], strict=True)]
    table.add_row("", "ratio", *map("{:.2f}".format, ratios), end_section=True)


def update(actor: Actor, batch: Batch) -> None:
    assert actor.training_model is not None
    actor.training_model.zero_gradients()
    actor.accumulate(batch, REINFORCE)


def seconds(work: Callable[[], object]) -> float:
    on_cuda = torch.cuda.is_available()
    clock = time.perf_counter if on_cuda else time.process_time
    started = clock()
    work()
    if on_cuda:
        torch.cuda.synchronize()
    return clock() - started


def tokens_run(batch: Batch) -> int:
    rows = list(range(len(batch)))
    every = prediction_micro_batches(batch, rows, max_tokens=1 << 30, padded=padding(1), device=torch.device("cpu"))
    return sum(len(micro_batch.input_ids) for micro_batch in every)


def kept_bytes(work: Callable[[], object]) -> int:
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        work()
    return sum(kept.values())


if __name__ == "__main__":
    main()
