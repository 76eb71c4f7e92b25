"""Engines of families whose layers differ in how far attention reaches, on prompts far longer than the window.

torchrun --nproc-per-node 2 -m tests.distributed.window_engine_worker CHECKPOINTS OUT FAMILY ...
"""

import json
import sys
from collections.abc import Mapping
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.architecture.mixers.attention import CPU_BLOCK
from hybridflow.architecture.spec import read_spec
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.patches import join_groups
from tests.distributed.engine_weights import EngineShards
from tests.distributed.engine_worker import CONFIG, MAX_LENGTH, SAMPLING, against_huggingface, prompts
from tests.distributed.pairs_worker import untouched_class
from tests.rollout.responses import responses_of

NUM_RANKS, NUM_LAYERS = 2, 4
KV_CACHE_BYTES = 1 << 24
LAYOUTS = {"tp1": RolloutLayout(1, 1, ((0,), (1,))), "tp2": RolloutLayout(2, 1, ((0, 1),))}


def main(checkpoints: Path, out: Path, families: list[str]) -> None:
    platform = platforms.start(seed=0)
    results = {
        f"{family} {name}": check(checkpoints / family / "policy", layout, platform)
        for family in families
        for name, layout in LAYOUTS.items()
    }
    everyone = [None] * platform.world_size
    dist.all_gather_object(everyone, results)
    if platform.rank == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


def check(path: Path, layout: RolloutLayout, platform: platforms.Platform) -> dict:
    """Twice: the second time keys and values of the prompts may be in the cache."""
    stages = (tuple(range(NUM_LAYERS)),)
    join_groups(layout, stages, platform.local_rank)
    model = untouched_class(path).from_pretrained(path, dtype=torch.float32).eval()
    engine = build(path, model, layout, stages, platform)
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts()[:4])]
    found = {"blocks": blocks_of(engine)}
    for turn in ("first", "again"):
        greedy = responses_of(engine, requests, engine.params_at(0.0, SAMPLING, ()))
        sampled = responses_of(engine, requests, engine.sampling_params(SAMPLING, ()))
        found[turn] = against_huggingface(model, requests, greedy, sampled)
    engine.close()
    return found


def blocks_of(engine: RolloutEngine) -> dict:
    """Of the whole cache, and of one sequence of the longest, as vLLM counts them."""
    scheduler, config = engine._engine.engine_core.engine_core.scheduler, engine._engine.vllm_config
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    of_one = sum(ceil(spec.max_memory_usage_bytes(config) / spec.page_size_bytes) for spec in specs)
    return {"all": config.cache_config.num_gpu_blocks, "of_sequence": of_one, "groups": len(specs)}


def build(
    path: Path, model: PreTrainedModel, layout: RolloutLayout, stages: tuple, platform: platforms.Platform
) -> RolloutEngine:
    at, kv_heads = layout.coordinates(platform.rank), model.config.num_key_value_heads
    return RolloutEngine(
        path,
        EngineShards(apart(model.state_dict(), kv_heads), kv_heads, at.tp, layout.tp),
        dtype="float32",
        language_model=LanguageModel.of(read_spec(path)),
        layout=layout,
        stages=stages,
        max_length=MAX_LENGTH,
        sampling=SAMPLING,
        config=CONFIG,
        kv_cache_bytes=KV_CACHE_BYTES,
        block_tokens=CPU_BLOCK,
        platform=platform,
    )


def apart(tensors: Mapping[str, Tensor], num_kv_heads: int) -> dict[str, Tensor]:
    """Projections that lie in one tensor, as Phi-3 has them, with names of their own."""
    found = dict(tensors)
    for name, x in tensors.items():
        if ".qkv_proj." in name:
            dim = 2 * tensors[name.replace("qkv_proj", "o_proj")].shape[1] // (2 * 8)  # of 8 heads
            kv = num_kv_heads * dim
            for part, rows in zip("qkv", x.split([len(x) - 2 * kv, kv, kv]), strict=True):
                found[name.replace("qkv_proj", f"{part}_proj")] = rows
        if ".gate_up_proj." in name:
            for part, rows in zip(("gate", "up"), x.chunk(2), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj")] = rows
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
