"""On every rank: build the roles on several layouts and save what they compute, as whole HuggingFace tensors.

torchrun --nproc-per-node N -m tests.distributed.parity_worker CHECKPOINTS OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.algorithms.advantages import gae, whiten
from hybridflow.algorithms.kl import kl_k1
from hybridflow.algorithms.rewards import token_rewards
from hybridflow.batch import RolloutBatch, TrainBatch
from hybridflow.config import OptimizerConfig, RewardModelConfig, RoleConfig, TrainedRoleConfig
from hybridflow.models.build import named_weights
from hybridflow.models.weights import local_slice, split_parts
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.roles.base import Role
from hybridflow.roles.objectives import PolicyObjective, value_objective
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, RewardModel
from tests.distributed.cases import ADAM, ALGORITHM, BUDGETS, HYPER, SGD, Case, cases_for, make_rollout


def main(checkpoints: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    exchange = Exchange(dist.group.WORLD, platform.device)
    for case in cases_for(platform.world_size):
        for family in ("llama", "qwen2"):
            result = run_case(case, checkpoints / family, platform, exchange)
            if platform.rank == 0:
                torch.save(result, out / f"{case.name}-{family}.pt")
    platforms.stop()


def run_case(case: Case, models: Path, platform: platforms.Platform, exchange: Exchange) -> dict[str, torch.Tensor]:
    shared = {"platform": platform, "exchange": exchange}
    rollout = make_rollout()
    layout = {"tensor_parallel_size": case.tp, "sequence_parallel": case.sequence_parallel, "dtype": "float32"}
    results = {}

    def trained(name: str, optimizer: OptimizerConfig, budget: int) -> TrainedRoleConfig:
        return TrainedRoleConfig(
            model=str(models / name), optimizer=optimizer, recompute=case.recompute, micro_batch_tokens=budget, **layout
        )

    reference = Reference(
        RoleConfig(model=str(models / "reference"), **layout), temperature=HYPER.temperature, **shared
    )
    reward = RewardModel("reward", RewardModelConfig(model=str(models / "reward"), **layout), **shared)
    for budget in BUDGETS if case.all_budgets else BUDGETS[:1]:
        actor = Actor(trained("policy", SGD, budget), temperature=HYPER.temperature, **shared)
        critic = Critic(trained("critic", SGD, budget), **shared)
        batch = estimate(rollout, actor, critic, reference, reward)
        results |= {f"{budget}/{name}": getattr(batch, name) for name in ESTIMATES}
        objective, values = PolicyObjective.of(ALGORITHM), value_objective(ALGORITHM)
        actor.trained.zero_gradients(), critic.trained.zero_gradients()
        actor.accumulate(batch, objective, kl_coef=HYPER.kl_coef), critic.accumulate(batch, values)
        results |= {f"{budget}/actor_grad/{n}": x for n, x in whole(actor, lambda p: p.main_grad).items()}
        results |= {f"{budget}/critic_grad/{n}": x for n, x in whole(critic, lambda p: p.main_grad).items()}
        stats = actor.update(batch, objective, kl_coef=HYPER.kl_coef, lr=SGD.lr)
        critic.update(batch, values, lr=SGD.lr)
        results |= {f"{budget}/actor_stat/{name}": torch.as_tensor(value) for name, value in stats.items()}
        results |= {f"{budget}/actor_sgd/{n}": x for n, x in whole(actor, lambda p: p.data).items()}
        results |= {f"{budget}/critic_sgd/{n}": x for n, x in whole(critic, lambda p: p.data).items()}
    adam = Actor(trained("policy", ADAM, BUDGETS[0]), temperature=HYPER.temperature, **shared)
    for _ in range(2):
        adam.update(batch, objective, kl_coef=HYPER.kl_coef, lr=ADAM.lr)
    return results | {f"actor_adam/{n}": x for n, x in whole(adam, lambda p: p.data).items()}


ESTIMATES = ("log_probs", "ref_log_probs", "values", "scores", "rewards", "advantages", "returns")


def estimate(
    rollout: RolloutBatch, actor: Actor, critic: Critic, reference: Reference, reward: RewardModel
) -> TrainBatch:
    log_probs, ref_log_probs = actor.log_probs(rollout), reference.log_probs(rollout)
    values, scores, mask = critic.values(rollout), reward.scores(rollout), rollout.response_mask
    rewards = token_rewards(
        scores, kl_k1(log_probs, ref_log_probs) * mask, mask, lengths=rollout.lengths, kl_coef=HYPER.kl_coef
    )
    advantages, returns = gae(
        rewards, values, mask, lengths=rollout.lengths, gamma=HYPER.gamma, gae_lambda=HYPER.gae_lambda
    )
    return TrainBatch(
        **vars(rollout),
        log_probs=log_probs,
        ref_log_probs=ref_log_probs,
        values=values,
        scores=scores,
        rewards=rewards,
        advantages=whiten(advantages, mask),
        returns=returns,
    )


def whole(role: Role, of) -> dict[str, torch.Tensor]:
    """HuggingFace name -> whole tensor, gathered over the tensor-parallel group; `of` picks a tensor of a parameter."""
    tensors = {}
    for weight, parameter in named_weights(role.model, role.spec, value_head=role.value_head):
        shards = [torch.empty_like(parameter, dtype=torch.float32) for _ in range(role.grid.tp)]
        dist.all_gather(shards, of(parameter).detach().float().contiguous(), group=role.grid.groups.tp)
        parts = [split_parts(weight, x, role.spec, r, role.grid.tp) for r, x in enumerate(shards)]
        for i, name in enumerate(weight.hf):
            dim, start, stop = local_slice(weight, i, role.spec, 0, role.grid.tp)
            replicated = stop - start == weight.shapes(role.spec)[i][dim]
            tensors[name] = parts[0][i].clone() if replicated else torch.cat([p[i] for p in parts], dim=dim)
    return tensors


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
