"""On every rank: an iteration of every algorithm on fixed data in several layouts; what it computes, as whole tensors.

torchrun --nproc-per-node N -m tests.distributed.fixed_worker MODELS OUT LAYOUT ...

The models are built once a layout, and have their first weights back before each algorithm.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.example_batches import pair_batch
from hybridflow.data.examples import Example
from hybridflow.data.usable import Dropped
from hybridflow.flows.bookkeeping import FixedDataBookkeeping
from hybridflow.flows.fixed import evaluate_fixed, fixed_flow
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles
from hybridflow.flows.run import Run
from hybridflow.models.prompt_groups import replica_rows
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from hybridflow.trainers.fixed_data import build_models
from tests.distributed.cases import Case
from tests.distributed.fixed_cases import (
    ALGORITHMS,
    LAYOUTS,
    MAX_LENGTH,
    NUM_ROWS,
    SEED,
    SGD,
    Trained,
    examples,
    layout_name,
)
from tests.distributed.gather import whole
from tests.distributed.parity_worker import BUCKET_BYTES, gradients_kept


class GivenExamples:
    """In the place of a data set."""

    def __init__(self, rows: list[Example]) -> None:
        self.rows = rows

        self.dropped = Dropped()

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, seed: int, shuffle: bool, *, position: int) -> SimpleNamespace:
        return SimpleNamespace(position=position + len(self.rows))

    def draw(self, order: object, count: int) -> SimpleNamespace:
        return SimpleNamespace(items=self.rows[:count], dropped=self.dropped)


def main(models: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)
    for case, budget in LAYOUTS:
        if layout_name(case, budget) not in names:
            continue
        built: dict[tuple, Roles] = {}
        first: dict[tuple, list[Tensor]] = {}
        results: dict[str, Tensor] = {}
        for name, trained in ALGORITHMS.items():
            config = experiment(trained, case, models, budget)
            key = (trained.model, config.trained_name)
            if key not in built:
                given = experiment(trained, case, models, budget, with_reference=True)
                built[key] = build_models(place(given, platform.world_size), world)
                first[key] = [x.clone() for x in weights(built[key])]
            for own, saved in zip(weights(built[key]), first[key], strict=True):
                own.copy_(saved)
            found = one_iteration(config, built[key], world)
            results |= {f"{name}/{key}": x for key, x in found.items()}
        batch = pair_batch(examples("pairs"))
        parts = replica_rows(batch, case.dp)
        results["rows_of_first_replica"] = torch.tensor(parts[0])
        if platform.rank == 0:
            torch.save(results, out / f"{layout_name(case, budget)}.pt")
    platforms.stop()


def weights(models: Roles) -> list[Tensor]:
    return [p.data for chunk in models.trained()[0].chunks for p in chunk.parameters()]


def one_iteration(config: FixedDataConfig, models: Roles, world: RunContext) -> dict[str, Tensor]:
    """What the flow computes, the gradient of its step before it is clipped, the weights after it, the metrics."""
    watchdog = Watchdog(config.watchdog.deadlines(), StopRequest(1.0, signals=()))
    rows = examples(config.algorithm.kind)
    of_world = {"exchange": world.exchange, "watch": world.watch}
    book = FixedDataBookkeeping(config, models, GivenExamples(rows), watchdog=watchdog, hooks=RunHooks(), **of_world)
    run = Run(config, book)
    results: dict[str, Tensor] = {}
    (trained,) = models.trained()
    before = whole(trained, lambda p: p.data)
    if "score.weight" in before:
        results["score_before"] = before["score.weight"]
    told = evaluate_fixed(run, config.algorithm, rows, NUM_ROWS)
    book.begin(run, 1, 1)
    with gradients_kept([trained], results):
        done = book.finished(run, fixed_flow(run, config.algorithm))
    results = {name.replace(f"{trained.name}_grad", "grad"): x for name, x in results.items()}
    results |= {f"sgd/{n}": x for n, x in whole(trained, lambda p: p.data).items()}
    metrics = {name: torch.tensor(float(x)) for name, x in (done.metrics | told).items()}
    return results | {f"stat/{name.removeprefix(trained.name + '/')}": x for name, x in metrics.items()}


def experiment(
    trained: Trained, case: Case, models: Path, budget: int, *, with_reference: bool = False
) -> FixedDataConfig:
    """with_reference: one is there for the algorithms that share these models."""

    def role(name: str, **more: object) -> dict:
        return {"model": str(models / name), "micro_batch_tokens": budget, **case.layout(), **more}

    section = trained.section
    own = role(trained.model, optimizer=SGD.model_dump())
    if section["name"] == "sft" and with_reference:
        section = {"name": "dpo"}
    tree = {
        "name": "fixed",
        "seed": SEED,
        "num_iterations": 1,
        "data": {"train": "given", "batch_size": NUM_ROWS, "max_length": MAX_LENGTH},
        "algorithm": section,
    }
    if section["name"] == "reward_model":
        return FixedDataConfig.model_validate(tree | {"reward_model": own})
    tree |= {"actor": own}
    if section["name"] != "sft":
        tree |= {"reference": role("reference")}
    return FixedDataConfig.model_validate(tree)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
