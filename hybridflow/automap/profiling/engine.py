"""What the engine takes whatever the sizes of the model: a step, a layer, a sequence, a message, a generation.

Of narrow models: an engine on the first rank, and one of two ranks that exchange messages.
"""

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.automap.cost import Device
from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.profiling.tiny import PROMPT, VOCAB_SIZE, make_model, placed_run
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor
from hybridflow.rollout.engine import Request, RolloutEngine

HIDDEN, FEW, MANY = 64, 2, 10  # layers
TOKENS = 40
FEW_SEQUENCES, MANY_SEQUENCES = 1, 17
LARGE_VOCABULARY = 8192


@dataclass(frozen=True)
class EngineOverheads:
    """Seconds."""

    engine_step: float
    engine_layer: float
    engine_sequence: float
    engine_logit: float
    engine_message: float
    engine_wake: float


@dataclass(frozen=True)
class _Steps:
    """A decode step of an engine with few and with many sequences, and waking and sleeping."""

    few: float
    many: float
    wake: float


def engine_overheads(directory: Path, world: RunContext, profile: DeviceProfile) -> EngineOverheads:
    """Collective over the world; the first rank knows the result. profile: of all else."""
    few, many = (_measured(directory, layers, world, tp=1) for layers in (FEW, MANY))
    wide = _measured(directory, FEW, world, tp=1, vocabulary=LARGE_VOCABULARY)
    more = MANY_SEQUENCES - FEW_SEQUENCES
    of_sequence, of_wide = ((steps.many - steps.few) / more for steps in (few, wide))
    rows = (MANY_SEQUENCES, HIDDEN, LARGE_VOCABULARY)
    head = Device(profile).product(*rows, dtype="float32").seconds / MANY_SEQUENCES
    logit = max((of_wide - of_sequence - head) / (LARGE_VOCABULARY - VOCAB_SIZE), 0.0)
    sequence = max(of_sequence - VOCAB_SIZE * logit, 0.0)
    layer = max((many.few - few.few) / (MANY - FEW), 0.0)
    message = 0.0
    if profile.collectives:
        shared = _measured(directory, MANY, world, tp=2)
        message = max((shared.few - many.few) / (2 * MANY + 2) - profile.collectives[0].latency, 0.0)
    step = max(few.few - FEW * layer - FEW_SEQUENCES * (sequence + VOCAB_SIZE * logit), 0.0)
    return EngineOverheads(step, layer, sequence, logit, message, engine_wake=few.wake)


def _measured(directory: Path, layers: int, world: RunContext, *, tp: int, vocabulary: int = VOCAB_SIZE) -> _Steps:
    model, platform = directory / f"engine_{layers}_{vocabulary}", world.platform
    if platform.rank == 0 and not model.exists():
        make_model(model, hidden=HIDDEN, layers=layers, positions=PROMPT + TOKENS, vocabulary=vocabulary)
    world.exchange.sum(torch.zeros(1, device=platform.device))
    run = placed_run(model, tp=tp, dtype="float32", length=PROMPT + TOKENS, budget=1024, output_dir=directory)
    actor = Actor(run.actor, temperature=1.0, world=world)
    generator = Generator(run, actor, eos_token_ids=(), platform=platform, exchange=world.exchange)
    if generator.engine is None:
        return _Steps(0.0, 0.0, 0.0)
    few, many = (_step(generator, count) for count in (FEW_SEQUENCES, MANY_SEQUENCES))
    wake = []
    for _ in range(3):
        begin = time.perf_counter()
        with generator.resharded(), generator.awake():
            pass
        wake.append(time.perf_counter() - begin)
    generator.engine.close()
    return _Steps(few, many, statistics.median(wake))


def _step(generator: Generator, sequences: int) -> float:
    """The median of the decode steps of one generation; of the first few some still read prompts."""
    assert generator.engine is not None
    requests = [Request([1 + i] * PROMPT, seed=i) for i in range(sequences)]
    with generator.resharded(), generator.awake():
        for _ in range(2):  # the first time compiles
            clock = [time.perf_counter()]
            _run_engine(generator.engine, requests, generator.params["sampled"], clock)
    steps = [end - begin for begin, end in itertools.pairwise(clock)]
    return statistics.median(steps[3:])


def _run_engine(engine: RolloutEngine, requests: list[Request], params: list[Any], clock: list[float]) -> None:
    """clock: the end of each step is added."""
    for _ in engine.stream(requests, params, stepped=lambda: clock.append(time.perf_counter())):
        pass
