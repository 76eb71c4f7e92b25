"""What of a rollout's Python is ours and what is vLLM's: microseconds of a request, of a step and of a response.

    python -m tests.bench.between_steps [--rows 256] [--tokens 64] [--rounds 5] [--profile]

A tiny random Llama on one rank, one step of the scheduler a token, as on a GPU. The seconds of each call that vLLM gets
are vLLM's; all else between the first request and the last response is ours. --profile: functions with most seconds.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from hybridflow.automap.profiling.tiny import PROMPT, make_model, placed_run
from hybridflow.batch import PromptBatch
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor
from hybridflow.rollout.generation import RolloutRequest, replica_responses
from hybridflow.rollout.row import RolloutRow
from tests.bench.iteration import directory_of_all
from tests.bench.shared_prompt import cpu
from tests.distributed.engine_weights import single_steps

SAMPLES = 8
HIDDEN, LAYERS = 64, 1


class Listener:
    """As one that nobody waits for."""

    def on_response(self, row: int, response: RolloutRow) -> None: ...
    def on_engine_step(self) -> None: ...
    def on_replica_done(self, prompts: Any, responses: Any) -> None: ...


class Timed:
    """Seconds and calls of a function of vLLM's, and of what stands around it on our side."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started
            self.calls += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="measured, after one that is not")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    platform = platforms.start(seed=0, platform="cpu")
    world = RunContext(platform, ProcessGroups(), Exchange(platforms.world_group(), platform.device), 24 << 20)
    with directory_of_all() as directory:
        generator = built(directory, options.tokens, world)
        with single_steps():
            found = [measured(generator, options.rows) for _ in range(options.rounds + 1)][1:]
            if options.profile:
                show_profile(generator, options.rows)
        generator.engine.close()
    show({name: statistics.median(each[name] for each in found) for name in found[0]}, options)
    platforms.stop()


def built(directory: Path, tokens: int, world: RunContext) -> Generator:
    model = make_model(directory / "model", hidden=HIDDEN, layers=LAYERS, positions=PROMPT + tokens)
    run = placed_run(model, dtype="float32", length=PROMPT + tokens, budget=1024, output_dir=directory)
    actor = Actor(run.actor, temperature=1.0, world=world)
    return Generator(run, actor, eos_token_ids=(), platform=world.platform, exchange=world.exchange)


def rollout(generator: Generator, rows: int) -> None:
    number = rows // SAMPLES
    lengths = torch.full((number,), PROMPT)
    prompts = PromptBatch(torch.arange(number * PROMPT) % 250, lengths, ("",) * number, {})
    sampling = generator._placed.config.sampling
    counts = torch.full((number,), SAMPLES)
    request = RolloutRequest(prompts, counts, sampling, seed=(1, 1), first_prompt=0)
    params, listener = generator.params["sampled"], Listener()
    replica_responses(generator.engine, params, request, range(number), listener=listener)


def measured(generator: Generator, rows: int) -> dict[str, float]:
    """Microseconds: of a request, a step and all a row, ours and vLLM's."""
    engine = generator.engine._engine
    add, step, busy = Timed(engine.add_request), Timed(engine.step), Timed(engine.has_unfinished_requests)
    own_add, own_step = Timed(generator.engine.add), Timed(generator.engine.step)
    with (
        generator.resharded(),
        generator.awake(),
        mock.patch.multiple(engine, add_request=add, step=step, has_unfinished_requests=busy),
        mock.patch.multiple(generator.engine, add=own_add, step=own_step),
    ):
        started = time.perf_counter()
        rollout(generator, rows)
        seconds = time.perf_counter() - started
    theirs = add.seconds + step.seconds + busy.seconds
    return {
        "request ours": 1e6 * (own_add.seconds - add.seconds) / rows,
        "request vLLM": 1e6 * add.seconds / rows,
        "step ours": 1e6 * (own_step.seconds - step.seconds) / step.calls,
        "step vLLM": 1e6 * (step.seconds + busy.seconds) / step.calls,
        "rest ours": 1e6 * (seconds - own_add.seconds - own_step.seconds - busy.seconds) / rows,
        "share ours": (seconds - theirs) / seconds,
        "steps": step.calls,
    }


def show(found: dict[str, float], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.rows} rows of {options.tokens} tokens, {found['steps']:.0f} steps; {cpu()}")
    for column in ("microseconds of", "ours", "vLLM's"):
        table.add_column(column, justify="right")
    table.add_row("a request", f"{found['request ours']:.1f}", f"{found['request vLLM']:.1f}")
    table.add_row("a step", f"{found['step ours']:.1f}", f"{found['step vLLM']:.1f}")
    table.add_row("a row, beside them", f"{found['rest ours']:.1f}", "")
    Console(width=100).print(table)
    print(f"ours of all: {100 * found['share ours']:.2f} %")


def show_profile(generator: Generator, rows: int) -> None:
    profile = cProfile.Profile()
    with generator.resharded(), generator.awake():
        profile.runcall(rollout, generator, rows)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
