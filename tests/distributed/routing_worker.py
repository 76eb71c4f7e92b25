"""On every rank: log-probs, a loss and its gradients where the actor takes given experts; as whole HuggingFace tensors.

torchrun --nproc-per-node N -m tests.distributed.routing_worker CHECKPOINTS OUT CASE/FAMILY ...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.flows.step_metrics import routing_metrics
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import negative_log_likelihood
from hybridflow.roles.policy import Actor, Reference
from tests.distributed.cases import GROUPS, NUM_LAYERS, SGD, Case
from tests.distributed.gather import whole
from tests.distributed.parity_worker import BUCKET_BYTES, experiment
from tests.distributed.routing_cases import BUDGETS, CASES, CHOSEN, FAMILIES, NUM_EXPERTS, make_routed_groups


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for case in CASES:
        for family in [family for family in FAMILIES if f"{case.name}/{family}" in names]:
            found: dict[str, Tensor] = {}
            for budget in BUDGETS:
                found |= {f"{budget}/{name}": x for name, x in run_case(case, checkpoints / family, budget, world)}
            if platform.rank == 0:
                torch.save(found, out / f"{case.name}-{family}.pt")
    platforms.stop()


def run_case(case: Case, models: Path, budget: int, world: RunContext) -> list[tuple[str, Tensor]]:
    config = experiment(GROUPS, case, models, SGD, budget)
    placed = place(config, world.platform.world_size)
    (batch, experts), temperature = make_routed_groups(), config.sampling.temperatures
    reference = Reference(placed.models["reference"], temperature=temperature, world=world)
    sizes = RoutingSizes(NUM_LAYERS, CHOSEN, NUM_EXPERTS)
    actor = Actor(placed.actor, temperature=temperature, world=world, routing=sizes)
    actor.begin_iteration(1, 1)
    world.exchange.gather(actor.log_probs(batch))
    own_load = load_of(actor, world)
    batch = actor.records.take(batch, experts)
    actor.begin_iteration(1, 1)
    ref_log_probs, log_probs = world.exchange.gather_all([reference.log_probs(batch), actor.log_probs(batch)])
    differ = routing_metrics(actor, world.exchange)[0]["rollout/experts_differ"]
    load = load_of(actor, world)
    actor.training_model.zero_gradients()
    loss = world.exchange.sum(actor.accumulate(batch, negative_log_likelihood()))[0]
    gradients = whole(actor, lambda p: p.main_grad)
    actor.begin_iteration(1, 1)
    actor.update(batch, negative_log_likelihood())
    at_step = routing_metrics(actor, world.exchange)[0]["rollout/experts_differ"]
    loads = {"own_load": own_load, "load": load, "load_at_step": load_of(actor, world)}
    numbers = {"loss": loss, "differ": torch.tensor(differ), "differ_at_step": torch.tensor(at_step)}
    found = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, **numbers, **loads}
    return [*found.items(), *((f"grad/{name}", x) for name, x in gradients.items())]


def load_of(actor: Actor, world: RunContext) -> Tensor:
    """(layers + 2,): of each layer, and the two metrics."""
    metrics, of_layers = routing_metrics(actor, world.exchange)
    assert list(of_layers) == list(range(NUM_LAYERS))
    names = ("rollout/experts_load_max_over_mean", "rollout/experts_load_worst_layer")
    return torch.tensor([*of_layers.values(), *(metrics[name] for name in names)], dtype=torch.float64)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
