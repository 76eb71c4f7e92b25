"""Runs of configs, each for so many iterations: what each rank then holds, and what is foretold: OUT/NAME_RANK.json.

torchrun --nproc-per-node 2 -m tests.planning.auto_worker OUT NUM_ITERATIONS CONFIG...
"""

import json
import sys
from pathlib import Path

from hybridflow.config import read_tree
from hybridflow.fixed_config import FixedDataConfig, config_class
from hybridflow.fixed_trainer import FixedDataTrainer
from hybridflow.parallel import platform as platforms
from hybridflow.planning.explained import chosen_values
from hybridflow.planning.forecast import memory_of
from hybridflow.roles.base import TrainedRole
from hybridflow.trainer import RLTrainer


def report(trainer: RLTrainer | FixedDataTrainer) -> dict[str, object]:
    rank, memory = trainer.platform.rank, memory_of(trainer.placed)
    found: dict[str, object] = {"chosen": chosen_values(trainer.config), "first": trainer.run.state.iteration}
    for name, role in trained(trainer).items():
        layout = trainer.placed.models[name].layout
        if role is None or rank not in layout:
            continue
        counted = memory.roles[name].training[layout.coordinates(rank).pp]
        found[name] = {
            "held": role.trained.memory_bytes(),
            "counted": {kind: getattr(counted, kind) for kind in ("weights", "gradients", "optimizer")},
        }
    return found


def trained(trainer: RLTrainer | FixedDataTrainer) -> dict[str, TrainedRole | None]:
    if isinstance(trainer, FixedDataTrainer):
        return {trainer.config.trained_name: trainer.models.trained}
    return {"actor": trainer.roles.actor, "critic": trainer.roles.critic}


def start(config: Path) -> RLTrainer | FixedDataTrainer:
    fixed = config_class(read_tree(config, ())) is FixedDataConfig
    return FixedDataTrainer.from_yaml(config) if fixed else RLTrainer.from_yaml(str(config))


def main(out: Path, num_iterations: int, configs: list[Path]) -> None:
    for config in configs:
        trainer = start(config)
        first = trainer.run.state.iteration
        trainer.fit(num_iterations)
        found = report(trainer) | {"first": first + 1}
        (out / f"{config.stem}_{trainer.platform.rank}.json").write_text(json.dumps(found))
        # a winner may have its engine on one rank alone
        if isinstance(trainer, RLTrainer) and trainer.generator.engine is not None:
            trainer.generator.engine.close()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
