"""What models and functions make of one rollout, whoever has waited for whom, of a trainer that has taken no step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridflow.flows import overlapped_scoring as while_waiting
from hybridflow.flows.overlapped_scoring import PHASE, OverlappedModel, OverlappedScoring
from hybridflow.parallel.platform import fresh_store
from hybridflow.parallel.store_client import StoreClient
from hybridflow.trainers.online import OnlineTrainer

WAYS = (
    "nobody computes ahead",
    "all compute ahead",
    "replica 0 is late",
    "the last is late",
    "by timing alone",
    "it was kept",
)
LATE = WAYS[2:4]
RAN = "units that were run"


def scored_in_all_ways(trainer: OnlineTrainer) -> dict[str, dict[str, Any]]:
    """By way: the rollout and its results, and how much each rank has computed ahead, by rank."""
    notices = StoreClient(fresh_store(), "test")
    found = {way: scored(trainer, way, notices) for way in WAYS}
    notices.close()
    return found


def scored(trainer: OnlineTrainer, way: str, notices: StoreClient) -> dict[str, Any]:
    run, state = trainer.run, trainer.run.state
    trainer.book.begin(run, 1, 1)
    kept: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if way == "it was kept":  # by an earlier start, which has generated the same
        rollout = run.rollout.select(torch.arange(len(run.rollout)))
        kept = patch.object(trainer.hooks, "load_rollout", lambda prompts, iteration: rollout)
    with asked(way), late(trainer, way, notices), kept:
        rollout = run.generate()
    ahead = sum(len(model.ahead.known) for model in trainer.scoring._models if tells(model))
    known = run.whole(
        raw_scores=run.scores(rollout),
        log_probs=run.actor.log_probs(rollout),
        ref_log_probs=run.reference.log_probs(rollout),
        values=run.critic.values(rollout),
    )
    trainer.book.abandon(run, state)
    return {
        "tensors": rollout.tensors() | vars(known) | {n: x for n, x in run.metrics.items() if isinstance(x, Tensor)},
        "ahead": gathered(trainer, ahead),
        "late": trainer.generator.layout.replicas[late_replica(trainer, way)] if way in LATE else (),
        "seconds": gathered(trainer, trainer.book.watch.seconds.get(PHASE, -1.0)),
    }


def scored_by_new_weights(trainer: OnlineTrainer) -> tuple[float, float]:
    """The KL of a rollout to a reference that has run it ahead, and that then becomes the actor: before, and after."""
    run, state = trainer.run, trainer.run.state
    trainer.book.begin(run, 1, 1)
    with asked("all compute ahead"):
        rollout = run.generate()
    kl = []
    for update in (lambda actor: None, run.reference.copy_weights):
        update(run.actor)
        known = run.whole(p=run.actor.log_probs(rollout), q=run.reference.log_probs(rollout))
        kl.append(float((known.p - known.q).abs().max()))
    trainer.book.abandon(run, state)
    return kl[0], kl[1]


def asked(way: str) -> contextlib.AbstractContextManager[Any]:
    """Within the block whether others still generate is answered without looking."""
    answers: dict[str, Callable[[OverlappedScoring], bool]] = {
        "nobody computes ahead": lambda ahead: False,
        "all compute ahead": lambda ahead: any(ahead._pending.values()),
    }
    if way not in answers:
        return contextlib.nullcontext()
    return patch.object(OverlappedScoring, "_others_generate", lambda self, board: answers[way](self))


def late(trainer: OnlineTrainer, way: str, notices: StoreClient) -> contextlib.AbstractContextManager[Any]:
    """Within the block one replica has its last response only when others have run all the units that they can."""
    layout, engine, models = trainer.generator.layout, trainer.generator.engine, trainer.scoring._models
    if not models or engine is None or way not in LATE:
        return contextlib.nullcontext()
    slow = late_replica(trainer, way)
    before = notices.add(RAN, 0)
    assert before is not None
    if layout.coordinates(trainer.platform.rank).replica != slow:
        return patch.object(while_waiting, "_run", noted(while_waiting._run, lambda: notices.add(RAN)))
    stream, wanted = engine.stream, before + len(models) * (len(trainer.run.rollout) - 1)  # a unit is a row

    def held_up(requests: Any, params: Any, *, stepped: Callable[[], None]) -> Iterator[Any]:
        *first, last = stream(requests, params)
        for each in first:
            yield each
            stepped()
        until = time.monotonic() + 60
        while (notices.add(RAN, 0) or 0) < wanted and time.monotonic() < until:
            stepped()
            time.sleep(0.01)
        yield last

    return patch.object(engine, "stream", held_up)


def late_replica(trainer: OnlineTrainer, way: str) -> int:
    """The first, or the last that has a prompt."""
    return 0 if way == LATE[0] else min(len(trainer.generator.layout.replicas), len(trainer.run.prompts)) - 1


def noted(run: Callable[..., None], note: Callable[[], object]) -> Callable[..., None]:
    """`run`, noted once for all ranks of the model's block."""

    def run_and_note(model: OverlappedModel, *args: Any) -> None:
        run(model, *args)
        if tells(model):
            note()

    return run_and_note


def tells(model: OverlappedModel) -> bool:
    """On one rank of each of the model's blocks."""
    return model.role.grid.contributes and model.role.grid.cp_rank == 0


def gathered(trainer: OnlineTrainer, value: float) -> list[float]:
    """Of every rank."""
    own = torch.zeros(trainer.platform.world_size, dtype=torch.float64)
    own[trainer.platform.rank] = value
    return trainer.exchange.sum(own).tolist()
