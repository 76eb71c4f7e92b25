"""A decode step of the engine on CPUs, in turns: vLLM's own; layers and draws as kernels in C; several steps at once.

    torchrun --nproc-per-node 2 -m tests.bench.engine_step [--sequences 1 8 32] [--dtype float32 bfloat16] [--rounds 5]

Each rank has an engine of its own over the same random Llama. Milliseconds of a step, the mean of a generation's steps
but for that of the prompts, the median of the rounds, of rank 0. Single products, norms and attention are the kernels
that they otherwise are.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybridflow.automap.profiling.tiny import PROMPT, make_model, placed_run
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor
from hybridflow.rollout.engine import Request
from hybridflow.rollout.patches import prepare_vllm
from tests.bench.iteration import directory_of_all
from tests.bench.shared_prompt import cpu
from tests.distributed.engine_weights import single_steps, vllms_own_layers

HIDDEN, LAYERS, VOCABULARY = 256, 5, 4096  # 7.3 M parameters
TOKENS = 128


@contextlib.contextmanager
def vllms_own() -> Iterator[None]:
    with vllms_own_layers(), single_steps():
        yield


WAYS = {"vLLM's": vllms_own, "in C": single_steps, "several": contextlib.nullcontext}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    options = parser.parse_args()
    platform = platforms.start(seed=0)
    prepare_vllm()
    world = RunContext(
        platform, ProcessGroups(), Exchange(platforms.world_group(), platform.device), bucket_bytes=24 << 20
    )
    table = Table(title=f"milliseconds a step, {platform.world_size} ranks; {cpu()}")
    for column in ("dtype", "sequences", *WAYS, "times"):
        table.add_column(column, justify="right")
    with directory_of_all() as directory:
        for dtype in options.dtype:
            generator = engine(directory, dtype, world)
            for sequences in options.sequences:
                seconds = in_turns(generator, sequences, options.rounds)
                shown = (f"{1e3 * each:.2f}" for each in seconds)
                table.add_row(dtype, str(sequences), *shown, f"{seconds[0] / seconds[-1]:.2f}")
            generator.engine.close()
    if platform.rank == 0:
        Console(width=100).print(table)
    platforms.stop()


def engine(directory: Path, dtype: str, world: RunContext) -> Generator:
    model, size, length = directory / "model", world.platform.world_size, PROMPT + TOKENS
    if world.platform.rank == 0 and not model.exists():
        make_model(model, hidden=HIDDEN, layers=LAYERS, positions=length, vocabulary=VOCABULARY)
    dist.barrier(group=dist.group.WORLD)
    run = placed_run(model, dp=size, dtype=dtype, length=length, budget=1024, output_dir=directory)
    actor = Actor(run.actor, temperature=1.0, world=world)
    return Generator(run, actor, eos_token_ids=(), platform=world.platform, exchange=world.exchange)


def in_turns(generator: Generator, sequences: int, rounds: int) -> list[float]:
    """Seconds of a step, by each way."""
    times: list[list[float]] = [[] for _ in WAYS]
    for _ in range(rounds + 1):
        for way, found in zip(WAYS.values(), times, strict=True):
            with way():
                found.append(step(generator, sequences))
    return [statistics.median(found[1:]) for found in times]


def step(generator: Generator, sequences: int) -> float:
    requests = [Request([1 + i] * PROMPT, seed=i) for i in range(sequences)]
    dist.barrier(group=dist.group.WORLD)
    with generator.resharded(), generator.awake():
        clock = [time.perf_counter()]
        for _ in generator.engine.stream(
            requests, generator.params["sampled"], stepped=lambda: clock.append(time.perf_counter())
        ):
            pass
    return (clock[-1] - clock[1]) / (TOKENS - 1)  # the first step is that of the prompts


if __name__ == "__main__":
    main()
