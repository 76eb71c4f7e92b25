"""How much longer than a share of the processors says work takes while many ranks of a host are busy.

Every rank has a model and an engine of its own, large enough that they do not all stay in the caches; one works alone,
then two, four, ... at once, while the others wait.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hybridflow.automap.device import Contention, Crowding
from hybridflow.automap.profiling.groups import sizes
from hybridflow.automap.profiling.tiny import PROMPT, batch, make_model, placed_run
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor
from hybridflow.rollout.engine import Request

HIDDEN, LAYERS = 384, 4
ROWS, RESPONSE, SEQUENCES, REPEATS = 4, 56, 4, 3
VOCABULARY = 2048


def measured_contention(directory: Path, world: RunContext, shared: Contention) -> tuple[Crowding, ...]:
    """Collective over the world; every rank gets the same. One row a number of ranks."""
    platform, model = world.platform, directory / "crowd"
    if platform.rank == 0:
        make_model(model, hidden=HIDDEN, layers=LAYERS, positions=PROMPT + RESPONSE, vocabulary=VOCABULARY)
    world.exchange.sum(torch.zeros(1))
    run = placed_run(
        model,
        dp=platform.world_size,
        dtype="float32",
        length=PROMPT + RESPONSE,
        budget=ROWS * (PROMPT + RESPONSE),
        output_dir=directory,
    )
    actor = Actor(run.actor, temperature=1.0, world=world)
    rows = batch(ROWS, RESPONSE)

    def scores() -> None:
        with actor.computing_all_rows():
            actor.log_probs(rows)

    generator = Generator(run, actor, eos_token_ids=(), platform=platform, exchange=world.exchange)
    assert generator.engine is not None, "every rank generates"
    with generator.resharded(), generator.awake():
        engine = _of_crowds(lambda: _run_engine(generator), world)
    training = _of_crowds(scores, world)
    generator.engine.close()
    return tuple(
        Crowding(
            ranks=count,
            training=max(1.0, training[count] / training[1] / max(1.0, count / shared.products)),
            engine=max(1.0, engine[count] / engine[1] / max(1.0, count / shared.products)),
        )
        for count in (1, *sizes(platform.world_size))
    )


def _run_engine(generator: Generator) -> None:
    assert generator.engine is not None
    requests = [Request([1 + i] * PROMPT, seed=i) for i in range(SEQUENCES)]
    for _ in generator.engine.stream(requests, generator.params["sampled"]):
        pass


def _of_crowds(work: Callable[[], None], world: RunContext) -> dict[int, float]:
    """Mean seconds of the ranks that work, by their number."""
    rank, world_size, found = world.platform.rank, world.platform.world_size, {}
    work()
    for count in (1, *sizes(world_size)):
        world.exchange.sum(torch.zeros(1))
        seconds = []
        for _ in range(REPEATS if rank < count else 0):
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        own = torch.tensor(statistics.mean(seconds) if seconds else 0.0, dtype=torch.float64)
        found[count] = float(world.exchange.sum(own)) / count
    return found
