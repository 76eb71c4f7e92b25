"""On every rank: an iteration of every algorithm on given responses in several layouts; what it computes, as whole
HuggingFace tensors. The models are built once a layout, and have their first weights back before each algorithm.

torchrun --nproc-per-node N -m tests.distributed.algorithms_worker MODELS OUT LAYOUT ...
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PerToken, RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.flows.models import Roles
from hybridflow.flows.of_algorithm import flow_of
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import PolicyObjective, ValueObjective
from tests.distributed.algorithm_cases import (
    ALGORITHMS,
    BY_LENGTH,
    LAYOUTS,
    MAX_RESPONSE_LENGTH,
    RUN,
    SGD,
    WHOLE,
    make_greedy,
    make_rollout,
    make_uneven_rollout,
)
from tests.distributed.cases import Case
from tests.distributed.gather import whole
from tests.distributed.given import given_roles, given_run, trained_weights
from tests.distributed.parity_worker import BUCKET_BYTES, gradients_kept


def main(models: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for case, budget in LAYOUTS.items():
        if case.name not in names:
            continue
        roles = given_roles(experiment({"name": "ppo"}, case, models, budget), world)
        first = [x.clone() for x in trained_weights(roles)]
        results: dict[str, Tensor] = {}
        for name in RUN[case]:
            compared = ALGORITHMS[name]
            for own, saved in zip(trained_weights(roles), first, strict=True):
                own.copy_(saved)
            config = experiment(compared.section, case, models, budget, by_length=compared.by_length)
            for policy in (roles.actor, roles.reference):
                policy.temperature = config.sampling.temperatures
            rollout = make_uneven_rollout() if compared.by_length else make_rollout()
            found = one_iteration(config, rollout, roles, world)
            results |= {f"{name}/{key}": x for key, x in found.items()}
        if case in WHOLE:
            results |= shared_and_not(roles, world)
        if platform.rank == 0:
            torch.save(results, out / f"{case.name}.pt")
    platforms.stop()


def one_iteration(
    config: ExperimentConfig, rollout: RolloutBatch, all_roles: Roles, world: RunContext
) -> dict[str, Tensor]:
    """What the flow computes, the gradient of its one step before it is clipped, and the weights after it."""
    roles = all_roles
    if config.critic is None:
        roles = replace(roles, critic=None)
    if config.reference is None:
        roles = replace(roles, reference=None)
    run, book = given_run(config, rollout, world, greedy=make_greedy(), roles=roles)
    book.begin(run, 1, 1)
    results: dict[str, Tensor] = {}
    with gradients_kept(roles.trained(), results):
        done = book.finished(run, flow_of(config.algorithm)(run))
    for role in roles.trained():
        results |= {f"{role.name}_sgd/{n}": x for n, x in whole(role, lambda p: p.data).items()}
    results |= done.batch.tensors()
    return results | {f"stat/{name}": torch.tensor(float(x)) for name, x in done.metrics.items()}


def shared_and_not(roles: Roles, world: RunContext) -> dict[str, Tensor]:
    """Log-probs, values and gradients of the same rows as samples of their prompts, and each as if of its own."""
    rollout = make_rollout()
    noise = torch.randn(len(rollout.input_ids), generator=torch.Generator().manual_seed(8)) * rollout.response_mask
    found = {}
    for kind, indices in (("shared", rollout.prompt_indices), ("not", torch.arange(len(rollout)))):
        batch = Targets(**vars(replace(rollout, prompt_indices=indices)), targets=noise)
        told = [roles.actor.log_probs(batch), roles.critic.values(batch)]
        found |= dict(zip((f"{kind}/log_probs", f"{kind}/values"), world.exchange.gather_all(told), strict=True))
        for role in roles.trained():
            role.training_model.zero_gradients()
        roles.actor.accumulate(batch, PolicyObjective(lambda log_probs, _, tokens: (log_probs * tokens.targets, {})))
        roles.critic.accumulate(batch, ValueObjective(lambda values, tokens: (values - tokens.targets) ** 2))
        for role in roles.trained():
            found |= {f"{kind}/{role.name}_grad/{n}": x for n, x in whole(role, lambda p: p.main_grad).items()}
    return found


@dataclass(frozen=True)
class Targets(RolloutBatch):
    targets: PerToken


def experiment(
    section: dict[str, Any], case: Case, models: Path, budget: int, *, by_length: bool = False
) -> ExperimentConfig:
    def role(name: str, **more: object) -> dict:
        return {"model": str(models / name), "micro_batch_tokens": budget, **case.layout(), **more}

    tree = {
        "name": "algorithms",
        "num_iterations": 1,
        "data": {"train": "given", "prompts_per_iteration": 2, "max_prompt_length": 4},
        "sampling": {"samples_per_prompt": 4, "max_response_length": MAX_RESPONSE_LENGTH}
        | (BY_LENGTH if by_length else {}),
        "actor": role("policy", optimizer=SGD.model_dump()),
        "critic": role("critic", optimizer=SGD.model_dump()),
        "reference": role("reference"),
        "reward": {"functions": [{"function": "tests.distributed.reward_functions:share_of_even"}]},
        "algorithm": section,
    }
    if section["name"] != "ppo":
        tree["critic"] = None
    if section["name"] == "distill":
        tree["reward"] = None
    if section.get("kl", {}).get("use") == "none" or section["name"] in ("dr_grpo", "opo", "maxrl"):
        tree["reference"] = None
    return ExperimentConfig.model_validate(tree)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
