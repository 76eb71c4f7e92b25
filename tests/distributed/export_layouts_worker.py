"""Build actors in many layouts and export each, untrained, into OUT/NAME.

torchrun --nproc-per-node 4 -m tests.distributed.export_layouts_worker CHECKPOINTS OUT
"""

import sys
from pathlib import Path

import torch.distributed as dist

from hybridflow.checkpoint.export import export_huggingface
from hybridflow.config import OptimizerConfig, TrainedRoleConfig
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.policy import Actor
from tests.placing import place_model

NUM_RANKS = 4
NUM_LAYERS = 4
MAX_FILE_BYTES = 100_000  # several files
TP2, TP4, PP2 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
INTERLEAVED = {"virtual_pipeline_parallel_size": 2}
MODELS = {
    "untied": ("llama", False, 4),
    "tied": ("qwen2", True, 4),
    "few_kv": ("qwen2", False, 2),
    "own_head": ("qwen3", True, 4),
    "qwen3_moe": ("qwen3_moe", False, 4),
    "glm4_moe": ("glm4_moe", False, 4),
    "qwen3_5_moe": ("qwen3_5_moe", False, 4),
    "deepseek_v3": ("deepseek_v3", False, 8),
}
CASES: dict[str, tuple[str, dict]] = {  # model, the actor's keys
    "pp2": ("untied", PP2),
    "pp2 tied": ("tied", PP2 | UNEVEN),
    "pp2 interleaved": ("untied", PP2 | INTERLEAVED),
    "tp2 pp2": ("untied", TP2 | PP2),
    "tp2 pp2 tied": ("tied", TP2 | PP2 | INTERLEAVED),
    "tp2 without rank 0": ("tied", TP2 | {"ranks": "2-3"}),
    "pp2 without rank 0": ("untied", PP2 | {"ranks": "1,3"}),
    "own head": ("own_head", TP2 | PP2),
    "tp4 of 2 kv heads": ("few_kv", TP4),
    "tp2 pp2 of 2 kv heads": ("few_kv", TP2 | PP2),
    "whole experts": ("qwen3_moe", TP2 | {"expert_parallel_size": 2}),
    "experts of two replicas": ("qwen3_moe", PP2 | {"expert_parallel_size": 2}),
    "experts of four replicas": ("glm4_moe", {"expert_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "gated delta nets": ("qwen3_5_moe", TP2 | PP2),
    "latent attention": ("deepseek_v3", TP2 | PP2),
    "whole experts in stages": ("glm4_moe", TP2 | PP2 | {"expert_parallel_size": 2}),
}


def main(checkpoints: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), bucket_bytes=1 << 14)
    for name, (model, keys) in CASES.items():
        config = TrainedRoleConfig(
            model=str(checkpoints / model / "policy"), dtype="float32", optimizer=OptimizerConfig(lr=0.1), **keys
        )
        actor = Actor(place_model("actor", config, platform.world_size), temperature=1.0, world=world)
        export_huggingface(actor, out / name, max_file_bytes=MAX_FILE_BYTES)
    platforms.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
