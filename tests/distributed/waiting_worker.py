"""What models and functions make of one rollout, whoever has waited for whom, of a trainer that has taken no step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridflow.flows import while_waiting
from hybridflow.flows.while_waiting import PHASE, WhileWaiting
from hybridflow.trainer import RLTrainer

WAYS = ("nobody computes ahead", "all compute ahead", "replica 0 is late", "the last is late", "by timing alone")
RAN = "test: units that were run"


def scored_in_all_ways(trainer: RLTrainer) -> dict[str, dict[str, Any]]:
    """By way: the rollout and its results, and how much each rank has computed ahead, by rank."""
    return {way: scored(trainer, way) for way in WAYS}


def scored(trainer: RLTrainer, way: str) -> dict[str, Any]:
    run, state = trainer.run, trainer.run.state
    run.begin(1, 1, lambda text: None)
    with asked(way), late(trainer, way):
        rollout = run.generate()
    ahead = sum(len(model.ahead.known) for model in run._ahead._models)
    known = run.whole(
        raw_scores=run.scores(rollout),
        log_probs=run.actor.log_probs(rollout),
        ref_log_probs=run.reference.log_probs(rollout),
        values=run.critic.values(rollout),
    )
    run.abandon(state)
    return {
        "tensors": vars(rollout) | vars(known) | {n: x for n, x in run.metrics.items() if isinstance(x, Tensor)},
        "ahead": gathered(trainer, ahead),
        "seconds": gathered(trainer, run._watch.seconds.get(PHASE, -1.0)),
    }


def asked(way: str) -> contextlib.AbstractContextManager[Any]:
    """Within the block whether others still generate is answered without looking."""
    answers = {"nobody computes ahead": False, "all compute ahead": True}
    if way not in answers:
        return contextlib.nullcontext()
    return patch.object(WhileWaiting, "_others_generate", lambda self: answers[way])


def late(trainer: RLTrainer, way: str) -> contextlib.AbstractContextManager[Any]:
    """Within the block one replica has its last response only when another has computed something ahead."""
    layout, engine, notices = trainer.generator.layout, trainer.generator.engine, trainer.run._ahead._notices
    slow = {"replica 0 is late": 0, "the last is late": len(layout.replicas) - 1}.get(way)
    if notices is None or engine is None or slow is None:
        return contextlib.nullcontext()
    before = notices.add(RAN, 0)
    assert before is not None
    if layout.coordinates(trainer.platform.rank).replica != slow:
        return patch.object(while_waiting, "_run", noted(while_waiting._run, lambda: notices.add(RAN)))
    stream = engine.stream

    def held_up(*args: Any) -> Iterator[Any]:
        *first, last = stream(*args)
        yield from first
        until = time.monotonic() + 60
        while notices.add(RAN, 0) == before and time.monotonic() < until:
            time.sleep(0.01)
        yield last

    return patch.object(engine, "stream", held_up)


def noted(run: Callable[..., None], note: Callable[[], object]) -> Callable[..., None]:
    def run_and_note(*args: Any) -> None:
        run(*args)
        note()

    return run_and_note


def gathered(trainer: RLTrainer, value: float) -> list[float]:
    """Of every rank."""
    own = torch.zeros(trainer.platform.world_size, dtype=torch.float64)
    own[trainer.platform.rank] = value
    return trainer.exchange.summed(own).tolist()
