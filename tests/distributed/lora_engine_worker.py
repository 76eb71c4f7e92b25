"""Two PPO iterations with adapters in the engine, of each family and placement of this number of ranks; the metrics.

torchrun --nproc-per-node N -m tests.distributed.lora_engine_worker CHECKPOINTS PROMPTS OUT CASE/FAMILY ...
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.ppo_worker import FIRST, SECOND, config, layout, run

RATE = 0.02  # of Adam: adapters that change much, so that the base alone would sample otherwise
BF16 = {"dtype": "bfloat16"}
# name: (ranks, layouts, rollout)
CASES: dict[str, tuple[int, dict, dict]] = {
    "one rank": (1, {}, {}),
    "in place": (2, {"actor": layout(2, sequence_parallel=True, recompute="full")}, {}),
    "gathered": (2, {"actor": layout(2)}, {"tensor_parallel_size": 1}),
    "bfloat16": (2, {"actor": layout(2, **BF16)}, {}),
    "stages to tp": (2, {"actor": layout(1, 2)}, {"tensor_parallel_size": 2}),
    "apart": (
        4,
        {
            "actor": layout(2, ranks=FIRST),
            "critic": layout(1, 2, ranks=FIRST),
            "reward": layout(1, 1, 2, ranks=FIRST),
        },
        {"ranks": SECOND, "tensor_parallel_size": 1},
    ),
    "apart, bigger": (
        4,
        {
            "actor": layout(1, 2, ranks=FIRST),
            "critic": layout(1, 2, ranks=FIRST),
            "reward": layout(1, 1, 2, ranks=FIRST),
        },
        {"ranks": SECOND, "tensor_parallel_size": 2, "sleep_level": 0},
    ),
}


def main(checkpoints: Path, prompts: Path, out: Path, names: list[str]) -> None:
    world_size, results = torchrun.torchrun_rank()[1], dict[str, Any]()
    for name in names:
        case, _, family = name.partition("/")
        num_ranks, layouts, rollout = CASES[case]
        assert num_ranks == world_size
        trainer = OnlineTrainer(with_lora(config(checkpoints / family, prompts, layouts, rollout)))
        actor = trainer.roles.actor
        before = {name: x.clone() for name, (_, x) in actor.weights().items() if "lora" not in name}
        results[name] = [run(trainer, iteration) for iteration in (1, 2)]
        after = actor.weights()
        results[name][-1]["base stays"] = all(torch.equal(x, after[name][1]) for name, x in before.items())
        if trainer.generator.engine is not None:
            trainer.generator.engine.close()
        del trainer, actor, after
        gc.collect()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    platforms.stop()


def with_lora(config: ExperimentConfig) -> ExperimentConfig:
    tree = config.model_dump()
    adam = {"name": "adam", "lr": RATE, "zero1": True}
    tree["actor"] |= {"lora": {"rank": 4, "alpha": 8}, "optimizer": adam}
    return ExperimentConfig.model_validate(tree | {"reference": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
