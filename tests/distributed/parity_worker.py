"""On every rank: run the product's flows on given responses in several layouts; save what they compute, as whole
HuggingFace tensors.

torchrun --nproc-per-node N -m tests.distributed.parity_worker CHECKPOINTS OUT
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithm_config import GRPO, PPO
from hybridflow.batch import RolloutBatch
from hybridflow.config import ExperimentConfig, OptimizerConfig
from hybridflow.flows.run import Run
from hybridflow.models import pipeline
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import TrainedRole, World
from hybridflow.roles.objectives import policy_loss
from hybridflow.trainer import flow_of
from tests.distributed.cases import (
    ADAM,
    ALGORITHM,
    BUDGETS,
    FAMILIES,
    GROUPED,
    GROUPS,
    HYPER,
    SGD,
    Case,
    applies,
    cases_for,
    make_groups,
    make_rollout,
)
from tests.distributed.gather import whole
from tests.distributed.given import given_run

BUCKET_BYTES = 1 << 14  # several storages a model


def main(checkpoints: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    world = World(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for case in cases_for(platform.world_size):
        for family in [family for family in FAMILIES if applies(case, family)]:
            result = run_case(case, checkpoints / family, world)
            if family in GROUPED:
                result |= one_iteration(GROUPS, make_groups(), case, checkpoints / family, world, "grpo")
            if platform.rank == 0:
                torch.save(result, out / f"{case.name}-{family}.pt")
    platforms.stop()


def run_case(case: Case, models: Path, world: World) -> dict[str, Tensor]:
    results = {}
    for budget in BUDGETS if case.all_budgets else BUDGETS[:1]:
        results |= one_iteration(ALGORITHM, make_rollout(), case, models, world, str(budget), budget=budget)
    results |= two_adam_steps(case, models, world)
    if case.dp == 1:
        return results
    with looked_at(under_way := []):
        overlapped = two_adam_steps(case, models, replace(world, overlap=True))
    results |= {f"overlapped/{name}": x for name, x in overlapped.items()}
    return results | {"overlapped/under_way": torch.tensor(under_way)}


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
    algorithm: PPO | GRPO,
    rollout: RolloutBatch,
    case: Case,
    models: Path,
    world: World,
    prefix: str,
    *,
    budget: int = BUDGETS[0],
) -> dict[str, Tensor]:
    """What the flow computes, the gradients of its one step before they are clipped, and the weights after it."""
    run = given_run(experiment(algorithm, case, models, SGD, budget), rollout, world)
    run.begin(1, 1, lambda text: None)
    results: dict[str, Tensor] = {}
    trained = [run.actor, *([run.critic] if algorithm.name == "ppo" else [])]
    for role in trained:
        keep_gradients(role, results)
    done = run.finished(flow_of(algorithm)(run))
    results |= {name: x for name, x in vars(done.batch).items() if name not in vars(rollout)}
    results["scores"] = done.batch.raw_scores
    results |= {f"stat/{name}": torch.tensor(float(x)) for name, x in done.metrics.items()}
    for role in trained:
        results |= {f"{role.name}_sgd/{n}": x for n, x in whole(role, lambda p: p.data).items()}
    return {f"{prefix}/{name}": x for name, x in results.items()}


def keep_gradients(role: TrainedRole, results: dict[str, Tensor]) -> None:
    """Note the gradients that each step finds. All ranks are in every role's grid, so that all gather them."""
    step: Callable[[float], float] = role.trained.step

    def noting(lr: float) -> float:
        results.update({f"{role.name}_grad/{n}": x for n, x in whole(role, lambda p: p.main_grad).items()})
        return step(lr)

    role.trained.step = noting


def two_adam_steps(case: Case, models: Path, world: World) -> dict[str, Tensor]:
    """ZeRO-1, on the batch of the first iteration."""
    run: Run = given_run(experiment(ALGORITHM, case, models, ADAM, BUDGETS[0]), make_rollout(), world)
    run.begin(1, 1, lambda text: None)
    run.critic.lr = 0.0
    batch = flow_of(ALGORITHM)(run)
    run.actor.update(batch, policy_loss(ALGORITHM.policy, run.kl))
    return {f"actor_adam/{n}": x for n, x in whole(run.actor, lambda p: p.data).items()}


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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
