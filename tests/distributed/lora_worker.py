"""On every rank: run PPO and GRPO with adapters on given responses in several layouts; save what they compute, as whole
HuggingFace tensors.

torchrun --nproc-per-node N -m tests.distributed.lora_worker CHECKPOINTS OUT CASE/FAMILY ...
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.parts import read_shard
from hybridflow.architecture.peft_directory import Adapters
from hybridflow.architecture.tied_head import OUTPUT
from hybridflow.config import ExperimentConfig
from hybridflow.flows.models import Roles
from hybridflow.models.named_weights import named_weights
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext, TrainedRole
from hybridflow.roles.policy import Actor, Reference
from tests.distributed.cases import ADAM, ALGORITHM, GROUPS, SGD, Case, make_groups, make_rollout
from tests.distributed.gather import whole
from tests.distributed.given import given_roles, given_run
from tests.distributed.lora_cases import ALPHA, CASES, RANK, SOME, WITHOUT_CRITIC, targets
from tests.distributed.parity_worker import BUCKET_BYTES, experiment, one_iteration, or_error

BUDGET = 64


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for case, family in [each for each in CASES if f"{each[0].name}/{each[1]}" in names]:
        result = or_error(lambda case=case, family=family: run_case(case, checkpoints / family, world))
        if platform.rank == 0:
            torch.save(result, out / f"{case.name}-{family}.pt")
    platforms.stop()


def with_lora(config: ExperimentConfig, models: Path, **more: object) -> ExperimentConfig:
    """The actor with new adapters, which is the reference too; the critic on the actor's base, with PEFT's adapters."""
    tree = config.model_dump()
    own = {"rank": RANK, "alpha": ALPHA, "target_modules": targets(models.name), **more}
    tree["actor"]["lora"], tree["reference"] = own, None
    if config.critic is not None:
        tree["critic"]["model"] = str(models / "policy")
        tree["critic"]["lora"] = {"adapter_path": str(models / "critic_adapter")}
    return ExperimentConfig.model_validate(tree)


def fill(actor: TrainedRole, adapter: Path) -> None:
    """Adapters as they are after some steps: those of a directory."""
    source = Adapters(replace(actor.spec.lora, path=adapter))
    for weight, parameter in named_weights(actor.chunks, actor.spec, head="lm"):
        if weight.adapter:
            parameter.data.copy_(read_shard(source, weight, actor.spec, actor.grid.place(weight.group)))


def run_case(case: Case, models: Path, world: RunContext) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    if models.name not in WITHOUT_CRITIC:
        config = with_lora(experiment(ALGORITHM, case, models, SGD, BUDGET), models)
        batch, roles, found = one(config, make_rollout(), models, world, "ppo")
        assert roles.critic is not None and roles.actor is not None
        shared = {name: x.data_ptr() for name, (_, x) in roles.actor.weights().items() if "lora" not in name}
        own = {name: x.data_ptr() for name, (_, x) in roles.critic.weights().items()}
        results |= found | {
            "one_base": torch.tensor(all(own[name] == shared[name] for name in (own.keys() & shared) - {OUTPUT}))
        }
        results |= adam_steps(case, models, batch, world) | wrong_marks(case, models, batch, world)
    config = with_lora(experiment(GROUPS, case, models, SGD, BUDGET), models)
    results |= one(config, make_groups(), models, world, "grpo")[2]
    results |= beside_a_reference(case, models, world) | some_targets(case, models, world)
    return results


def one(config: ExperimentConfig, rollout, models: Path, world: RunContext, prefix: str):
    roles = given_roles(config, world)
    assert roles.actor is not None
    before = {name: x.clone() for name, (_, x) in roles.actor.weights().items() if "lora" not in name}
    fill(roles.actor, models / "adapter")
    batch, found = one_iteration(config, rollout, roles, world, prefix)
    after = roles.actor.weights()
    same = torch.tensor(all(torch.equal(x, after[name][1]) for name, x in before.items()))
    counts = [sum(buffer.grad_data.numel() for chunk in roles.actor.chunks for buffer in chunk.flat_buffers())]
    counts.append(sum(p.numel() for chunk in roles.actor.chunks for n, p in chunk.named_parameters() if "lora" in n))
    return batch, roles, found | {f"{prefix}/base_is_as_it_was": same, f"{prefix}/counts": torch.tensor(counts)}


def adam_steps(case: Case, models: Path, batch, world: RunContext) -> dict[str, Tensor]:
    """Two of ZeRO-1; where there are replicas, also with what they exchange under way while they compute."""
    found = {}
    for prefix, overlap in [("adam", False)] + [("overlapped", True)] * (case.dp > 1):
        actor, run = actor_on(case, models, batch, replace(world, overlap=overlap), ADAM)
        for _ in range(2):
            actor.update(batch, run.policy_loss(ALGORITHM.policy))
        actor.wait_for_weights()
        found |= {f"{prefix}/{name}": x for name, x in whole(actor, lambda p: p.data).items() if "lora" in name}
    return found


def actor_on(case: Case, models: Path, batch, world: RunContext, optimizer):
    config = with_lora(experiment(ALGORITHM, case, models, optimizer, BUDGET), models)
    placed = place(config, world.platform.world_size).actor
    actor = Actor(placed, temperature=config.sampling.temperatures, world=world)
    fill(actor, models / "adapter")
    run, book = given_run(config, batch, world, roles=Roles(actor))
    book.begin(run, 1, 1)
    return actor, run


def wrong_marks(case: Case, models: Path, batch, world: RunContext) -> dict[str, Tensor]:
    """What comes out where megatron is not told what ranks hold alike: it must be wrong."""
    found = {}
    for mark in ["sequence_parallel"] * case.sequence_parallel + ["tensor_model_parallel"] * (case.tp > 1):
        actor, run = actor_on(case, models, batch, world, SGD)
        for _, parameter in named_weights(actor.chunks, actor.spec, head="lm"):
            setattr(parameter, mark, False)
        actor.training_model.zero_gradients()
        actor.accumulate(batch, run.policy_loss(ALGORITHM.policy))
        grads = whole(actor, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))
        found |= {f"without_{mark}/{name}": x for name, x in grads.items() if "lora" in name}
        found[f"without_{mark}/norm"] = torch.tensor(float(actor.training_model.optimizer.get_grad_norm()))
    return found


def beside_a_reference(case: Case, models: Path, world: RunContext) -> dict[str, Tensor]:
    """The actor as its reference, beside a reference of the same directory: bit for bit; kept adapters, and resets."""
    config = with_lora(experiment(GROUPS, case, models, SGD, BUDGET), models)
    roles, rollout = given_roles(config, world), make_groups()
    fill(roles.actor, models / "adapter")
    plain = place(experiment(GROUPS, case, models, SGD, BUDGET), world.platform.world_size).models["reference"]
    base = replace(plain, spec=roles.actor.spec.base)
    reference = Reference(base, temperature=config.sampling.temperatures, world=world)
    exchange = world.exchange
    found = {
        "actor": exchange.gather_all([roles.actor.log_probs(rollout)])[0],
        "off": exchange.gather_all([roles.reference.log_probs(rollout)])[0],
        "base": exchange.gather_all([reference.log_probs(rollout)])[0],
    }
    roles.reference.copy_weights(roles.actor)
    found["kept"] = exchange.gather_all([roles.reference.log_probs(rollout)])[0]
    return {f"reference/{name}": x for name, x in found.items()}


def some_targets(case: Case, models: Path, world: RunContext) -> dict[str, Tensor]:
    """Two Adam steps where only some linear layers of a weight have adapters."""
    if models.name != "llama":
        return {}
    config = with_lora(experiment(GROUPS, case, models, ADAM, BUDGET), models, target_modules=SOME)
    roles = given_roles(config, world)
    for _ in range(2):
        one_iteration(config, make_groups(), roles, world, "some")
    return {f"some/{name}": x for name, x in whole(roles.actor, lambda p: p.data).items() if "lora" in name}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
