"""Two PPO iterations for each placement of this number of ranks; the metrics of each.

torchrun --nproc-per-node N -m tests.distributed.ppo_worker CHECKPOINTS PROMPTS OUT PLACEMENT ...
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import host_memory, torchrun
from hybridflow.parallel import platform as platforms
from hybridflow.recording.recorder import Recorder
from hybridflow.roles.base import RunContext
from hybridflow.trainers import online as trainers
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.engine_weights import differs_from_export, wrong_parameters

NUM_ITERATIONS = 2


def layout(tp: int = 1, pp: int = 1, dp: int | None = None, **more: object) -> dict:
    return {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp, **more}


FIRST, SECOND = "0-1", "2-3"
# name: (ranks, layout of each role, rollout)
PLACEMENTS: dict[str, tuple[int, dict, dict]] = {
    "single": (1, {}, {}),
    "each its own layout": (
        4,
        {
            "actor": layout(2, 2),
            "critic": layout(1, 2, 2),
            "reward": layout(2, 1, 2),
            "reference": layout(4),
        },
        {"tensor_parallel_size": 2},
    ),
    "interleaved": (
        4,
        {
            "actor": layout(1, 2, 2, virtual_pipeline_parallel_size=2),
            "critic": layout(2, 2, virtual_pipeline_parallel_size=2, sequence_parallel=True),
            "reward": layout(1, 4),
            "reference": layout(2, 2, num_layers_in_first_pipeline_stage=1),
        },
        {"pipeline_parallel_size": 2},
    ),
    "split": (
        4,
        {
            "actor": layout(1, 2, ranks=FIRST),
            "critic": layout(2, ranks=SECOND),
            "reward": layout(1, 1, 1, ranks="3"),
            "reference": layout(2, ranks=FIRST),
        },
        {"tensor_parallel_size": 2},
    ),
    "rollout apart": (
        4,
        {
            "actor": layout(2, ranks=FIRST),
            "critic": layout(1, 2, ranks=FIRST),
            "reward": layout(1, 1, 2, ranks=SECOND),
            "reference": layout(1, 1, 4),
        },
        {"ranks": SECOND, "tensor_parallel_size": 1, "sleep_level": 0},
    ),
}


HALF = {"dtype": "bfloat16", "optimizer": {"lr": 1e-3}}  # Adam with main weights, split by ZeRO-1
AWAY = {"offload_optimizer": True, "offload_gradients": True}
STAGED = {"offload_optimizer": "always"}
OVERLAPPED = "bfloat16, overlapped"  # what replicas exchange travels while they compute, as on GPUs
PLACEMENTS |= {
    "bfloat16": (4, {"actor": layout(2, 1, 2, **HALF)}, {"tensor_parallel_size": 1, "reshard_bucket_mib": 0.25}),
    "bfloat16, offloaded": (
        4,
        {"actor": layout(2, 1, 2, **HALF, **AWAY), "critic": AWAY},
        {"tensor_parallel_size": 1, "reshard_bucket_mib": 0.25},
    ),
    "bfloat16, staged": (
        4,
        {"actor": layout(2, 1, 2, **HALF, **STAGED), "critic": STAGED},
        {"tensor_parallel_size": 1, "reshard_bucket_mib": 0.25},
    ),
    OVERLAPPED: (4, {"actor": layout(2, 1, 2, **HALF)}, {"tensor_parallel_size": 1, "reshard_bucket_mib": 0.25}),
}


def main(checkpoints: Path, prompts: Path, out: Path, names: list[str]) -> None:
    world_size = torchrun.torchrun_rank()[1]
    host_memory.PART_BYTES = 1 << 16  # an optimizer's state has many parts
    results: dict[str, list[dict[str, Any]]] = {}
    for name, (num_ranks, layouts, rollout) in PLACEMENTS.items():
        if num_ranks == world_size and name in names:
            trainers.RunContext = partial(RunContext, overlap=name == OVERLAPPED)
            trainer = OnlineTrainer(config(checkpoints, prompts, layouts, rollout))
            handed_over = noted_hand_offs(trainer)
            results[name] = [
                run(trainer, iteration) | {"wrong_parameters": wrong_parameters(trainer)}
                for iteration in range(1, NUM_ITERATIONS + 1)
            ]
            results[name][-1] |= trainer.evaluate() | {"gathering": handed_over}
            if name == "bfloat16":
                results[name][-1]["differs_from_export"] = differs_from_export(trainer, out.with_suffix(".export"))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    platforms.stop()


def noted_hand_offs(trainer: OnlineTrainer) -> list[list[bool]]:
    """Of each hand-off from here on: whether a gather of parameters had been under way, and whether one still is."""
    found: list[list[bool]] = []
    actor, reshard = trainer.roles.actor, trainer.generator.reshard
    groups = (
        [group for chunk in actor.training_model.chunks for group in chunk.bucket_groups]
        if actor.training_model
        else []
    )
    wait, hand_over = actor.wait_for_weights, reshard.to_engine

    def under_way() -> bool:
        return any(group.param_gather_handle is not None for group in groups)

    def waited() -> None:
        found.append([under_way()])
        wait()

    def handed_over() -> object:
        found[-1].append(under_way())
        return hand_over()

    actor.wait_for_weights, reshard.to_engine = waited, handed_over
    return found


def run(trainer: OnlineTrainer, iteration: int) -> dict[str, float]:
    done = trainer.iterate(iteration, NUM_ITERATIONS, Recorder())
    tokens = {"tokens_checksum": float((done.batch.input_ids * (1 + done.batch.input_ids.cumsum(0) % 97)).sum())}
    return tokens | {name: float(value) for name, value in done.metrics.items()}


def config(models: Path, prompts: Path, layouts: dict, rollout: dict) -> ExperimentConfig:
    def role(key: str, model: str, **fields: object) -> dict:
        return {"model": str(models / model), "dtype": "float32", **fields, **layouts.get(key, {})}

    sgd = {"name": "sgd", "lr": 0.02}
    return ExperimentConfig.model_validate(
        {
            "name": "placements",
            "num_iterations": NUM_ITERATIONS,
            "data": {
                "train": str(prompts),
                "heldout": str(prompts.with_name("heldout.jsonl")),  # fewer rows than some role has replicas
                "prompts_per_iteration": 16,
                "max_prompt_length": 16,
            },
            "metrics": {"eval_reward": "hybridflow.rewards:exact_match"},
            "sampling": {"max_response_length": 10},
            "actor": role("actor", "policy", optimizer=sgd),
            "critic": role("critic", "critic", optimizer=sgd),
            "reference": role("reference", "reference"),
            "reward": {"models": [role("reward", "reward")]},
            "rollout": {"kv_cache_gib": 1 / 64, "max_num_seqs": 32, "max_num_batched_tokens": 512, **rollout},
            "algorithm": {"update": {"mini_batch_size": 8, "epochs": 2}, "kl": {"coef": 0.05}},
        }
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
