"""On every rank: run the product's flows on given responses in several layouts; save what they compute, as whole
HuggingFace tensors.

torchrun --nproc-per-node N -m tests.distributed.parity_worker CHECKPOINTS OUT CASE/FAMILY ...
"""

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.config import ExperimentConfig, OptimizerConfig
from hybridflow.config.algorithms import GRPO, PPO
from hybridflow.flows.models import Roles
from hybridflow.flows.of_algorithm import flow_of
from hybridflow.models import pipeline, prompt_groups
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext, TrainedRole
from hybridflow.roles.policy import Actor
from tests.distributed.cases import (
    ADAM,
    ALGORITHM,
    BUDGETS,
    CASES,
    GROUPS,
    HYPER,
    SGD,
    Case,
    budgets,
    make_groups,
    make_rollout,
)
from tests.distributed.gather import whole
from tests.distributed.given import given_roles, given_run, trained_weights

T = TypeVar("T")
BUCKET_BYTES = 1 << 14  # several storages a model


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for case, family in [each for each in CASES if f"{each[0].name}/{each[1]}" in names]:
        result = or_error(lambda case=case, family=family: run_case(case, checkpoints / family, world))
        if platform.rank == 0:
            torch.save(result, out / f"{case.name}-{family}.pt")
    platforms.stop()


def or_error(run: Callable[[], T]) -> T | str:
    """What a case computes, or its traceback: a family that cannot be built fails its own cases alone."""
    try:
        return run()
    except Exception:
        return traceback.format_exc()


def run_case(case: Case, models: Path, world: RunContext) -> dict[str, Tensor]:
    """Models are built once for each budget: those of the first are GRPO's, too, and its batch is Adam's."""
    results: dict[str, Tensor] = {}
    for budget in budgets(case, models.name)[1:]:
        config = experiment(ALGORITHM, case, models, SGD, budget)
        results |= one_iteration(config, make_rollout(), given_roles(config, world), world, str(budget))[1]
    with mock.patch.object(prompt_groups, "fits_alone", return_value=False):  # ranks that share tokens share all rows
        return results | run_first_budget(case, models, world)


def run_first_budget(case: Case, models: Path, world: RunContext) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    config = experiment(ALGORITHM, case, models, SGD, BUDGETS[0])
    roles = given_roles(config, world)
    first = [x.clone() for x in trained_weights(roles)]
    batch, found = one_iteration(config, make_rollout(), roles, world, str(BUDGETS[0]))
    results |= found | adam_steps(case, models, batch, world)
    for own, saved in zip(trained_weights(roles), first, strict=True):
        own.copy_(saved)
    config = experiment(GROUPS, case, models, SGD, BUDGETS[0])
    return results | one_iteration(config, make_groups(), replace(roles, critic=None), world, "grpo")[1]


def adam_steps(case: Case, models: Path, batch: RolloutBatch, world: RunContext) -> dict[str, Tensor]:
    """And, where there are replicas, with what they exchange under way while they compute."""
    results, _ = two_adam_steps(case, models, batch, world)
    if case.dp == 1:
        return results
    with looked_at(under_way := []):
        overlapped, gathering = two_adam_steps(case, models, batch, world, overlap=True)
    results |= {f"overlapped/{name}": x for name, x in overlapped.items()}
    return results | {"overlapped/under_way": torch.tensor(under_way), "overlapped/gathering": torch.tensor(gathering)}


@contextlib.contextmanager
def looked_at(under_way: list[bool]) -> Iterator[None]:
    """Of each backward pass that has ended, whether all sums over replicas are then already under way."""
    finalize = pipeline.finalize_model_grads

    def noting(model: list, *arguments: object) -> None:
        groups = [group for chunk in model for group in chunk.bucket_groups]
        under_way.append(all(group.grad_reduce_handle is not None for group in groups))
        finalize(model, *arguments)

    pipeline.finalize_model_grads = noting
    try:
        yield
    finally:
        pipeline.finalize_model_grads = finalize


def one_iteration(
    config: ExperimentConfig, rollout: RolloutBatch, roles: Roles, world: RunContext, prefix: str
) -> tuple[RolloutBatch, dict[str, Tensor]]:
    """The flow's batch. What it computes, the gradients of its one step before they are clipped, the weights after."""
    run, book = given_run(config, rollout, world, roles=roles)
    book.begin(run, 1, 1)
    results: dict[str, Tensor] = {}
    with gradients_kept(roles.trained(), results):
        done = book.finished(run, flow_of(config.algorithm)(run))
    results |= {name: x for name, x in vars(done.batch).items() if name not in vars(rollout)}
    results["scores"] = done.batch.raw_scores
    results |= {f"stat/{name}": torch.tensor(float(x)) for name, x in done.metrics.items()}
    for role in roles.trained():
        results |= {f"{role.name}_sgd/{n}": x for n, x in whole(role, lambda p: p.data).items()}
    return done.batch, {f"{prefix}/{name}": x for name, x in results.items()}


@contextlib.contextmanager
def gradients_kept(trained: Sequence[TrainedRole], results: dict[str, Tensor]) -> Iterator[None]:
    """Note the gradients that each step finds. All ranks are in every role's grid, so that all gather them."""
    steps = [role.training_model.step for role in trained]
    for role, step in zip(trained, steps, strict=True):
        role.training_model.step = functools.partial(_note_and_step, role, step, results)
    try:
        yield
    finally:
        for role, step in zip(trained, steps, strict=True):
            role.training_model.step = step


def _note_and_step(role: TrainedRole, step: Callable[[float], float], results: dict[str, Tensor], lr: float) -> float:
    gradients = whole(role, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))
    results.update({f"{role.name}_grad/{n}": x for n, x in gradients.items()})
    return step(lr)


def two_adam_steps(
    case: Case, models: Path, batch: RolloutBatch, world: RunContext, *, overlap: bool | None = None
) -> tuple[dict[str, Tensor], list[bool]]:
    """ZeRO-1, of a new actor on a batch that one with its weights has estimated.

    The weights; of the time after each step, and after the weights were asked for, whether all gathers are under way;
    whether each was waited for.
    """
    config = experiment(ALGORITHM, case, models, ADAM, BUDGETS[0])
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"overlap": overlap})})
    placed = place(config, world.platform.world_size).actor
    actor = Actor(placed, temperature=config.sampling.temperatures, world=world)
    run, book = given_run(config, batch, world, roles=Roles(actor))
    book.begin(run, 1, 1)
    groups = [group for chunk in actor.chunks for group in chunk.bucket_groups]
    gathering, begun, awaited = [], 0, list[object]()
    for _ in range(2):
        actor.update(batch, run.policy_loss(ALGORITHM.policy))
        gathering.append(all(group.param_gather_handle is not None for group in groups))
        for group in groups if gathering[-1] else []:
            handle, begun = group.param_gather_handle, begun + 1
            group.param_gather_handle = SimpleNamespace(wait=lambda handle=handle: awaited.append(handle.wait()))
    actor.weights()
    gathering.append(any(group.param_gather_handle is not None for group in groups))
    gathering.append(len(awaited) == begun)
    return {f"actor_adam/{n}": x for n, x in whole(actor, lambda p: p.data).items()}, gathering


def experiment(
    algorithm: PPO | GRPO, case: Case, models: Path, optimizer: OptimizerConfig, budget: int
) -> ExperimentConfig:
    def role(name: str, **more: object) -> dict:
        return {"model": str(models / name), "micro_batch_tokens": budget, **case.layout(), **more}

    trained = {"optimizer": optimizer.model_dump(), "recompute": case.recompute}
    sections = {
        "actor": role("policy", **trained),
        "reference": role("reference"),
        "reward": {"models": [role("reward")]},
    }
    if algorithm.name == "ppo":
        sections["critic"] = role("critic", **trained)
    groups = algorithm.name == "grpo"
    return ExperimentConfig.model_validate(
        {
            "name": "parity",
            "num_iterations": 1,
            "data": {"train": "given", "prompts_per_iteration": 2 if groups else 8, "max_prompt_length": 9},
            "sampling": {
                "samples_per_prompt": 4 if groups else 1,
                "max_response_length": 8,
                "temperature": HYPER.temperature,
            },
            "algorithm": algorithm.model_dump(),
            **sections,
        }
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
