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
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.planning.placed import PlacedModel, place_model
from hybridflow.roles.base import World
from hybridflow.roles.objectives import PolicyObjective, value_objective
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, RewardModel
from tests.distributed.cases import (
    ADAM,
    ALGORITHM,
    BUDGETS,
    FAMILIES,
    HYPER,
    SGD,
    Case,
    applies,
    cases_for,
    make_rollout,
)
from tests.distributed.gather import whole


def main(checkpoints: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    exchange = Exchange(dist.group.WORLD, platform.device)
    world = World(platform, ProcessGroups(), exchange, bucket_bytes=BUCKET_BYTES)
    for case in cases_for(platform.world_size):
        for family in [family for family in FAMILIES if applies(case, family)]:
            result = run_case(case, checkpoints / family, world)
            if platform.rank == 0:
                torch.save(result, out / f"{case.name}-{family}.pt")
    platforms.stop()


BUCKET_BYTES = 1 << 14  # several storages a model


def run_case(case: Case, models: Path, world: World) -> dict[str, torch.Tensor]:
    rollout, layout = make_rollout(), case.layout()
    results = {}

    def trained(name: str, optimizer: OptimizerConfig, budget: int) -> TrainedRoleConfig:
        return TrainedRoleConfig(
            model=str(models / name), optimizer=optimizer, recompute=case.recompute, micro_batch_tokens=budget, **layout
        )

    def placed(name: str, config: RoleConfig) -> PlacedModel:
        return place_model(name, config, world.platform.world_size)

    frozen = placed("reference", RoleConfig(model=str(models / "reference"), **layout))
    reference = Reference(frozen, temperature=HYPER.temperature, world=world)
    scored = placed("reward.models.0", RewardModelConfig(model=str(models / "reward"), **layout))
    reward = RewardModel(scored, world=world)
    for budget in BUDGETS if case.all_budgets else BUDGETS[:1]:
        actor = Actor(placed("actor", trained("policy", SGD, budget)), temperature=HYPER.temperature, world=world)
        critic = Critic(placed("critic", trained("critic", SGD, budget)), world=world)
        batch = estimate(rollout, actor, critic, reference, reward, world.exchange)
        results |= {f"{budget}/{name}": getattr(batch, name) for name in ESTIMATES}
        objective, values = PolicyObjective.of(ALGORITHM), value_objective(ALGORITHM)
        actor.trained.zero_gradients(), critic.trained.zero_gradients()
        actor.accumulate(batch, objective, kl_coef=HYPER.kl_coef), critic.accumulate(batch, values)
        results |= {f"{budget}/actor_grad/{n}": x for n, x in whole(actor, lambda p: p.main_grad).items()}
        results |= {f"{budget}/critic_grad/{n}": x for n, x in whole(critic, lambda p: p.main_grad).items()}
        stats = world.exchange.summed(actor.update(batch, objective, kl_coef=HYPER.kl_coef, lr=SGD.lr))
        critic.update(batch, values, lr=SGD.lr)
        results |= {f"{budget}/actor_stat/{name}": x for name, x in zip(Actor.report, stats, strict=True)}
        results |= {f"{budget}/actor_sgd/{n}": x for n, x in whole(actor, lambda p: p.data).items()}
        results |= {f"{budget}/critic_sgd/{n}": x for n, x in whole(critic, lambda p: p.data).items()}
    adam = Actor(placed("actor", trained("policy", ADAM, BUDGETS[0])), temperature=HYPER.temperature, world=world)
    for _ in range(2):
        adam.update(batch, objective, kl_coef=HYPER.kl_coef, lr=ADAM.lr)
    return results | {f"actor_adam/{n}": x for n, x in whole(adam, lambda p: p.data).items()}


ESTIMATES = ("log_probs", "ref_log_probs", "values", "scores", "rewards", "advantages", "returns")


def estimate(
    rollout: RolloutBatch,
    actor: Actor,
    critic: Critic,
    reference: Reference,
    reward: RewardModel,
    exchange: Exchange,
) -> TrainBatch:
    parts = [actor.log_probs(rollout), reference.log_probs(rollout), critic.values(rollout), reward.scores(rollout)]
    log_probs, ref_log_probs, values, scores = exchange.wholes(parts)
    mask = rollout.response_mask
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
