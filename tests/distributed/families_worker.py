"""Logits of every family, and two PPO iterations from HuggingFace directories and from converted ones.

torchrun --nproc-per-node 2 -m tests.distributed.families_worker CHECKPOINTS PROMPTS OUT

CHECKPOINTS/FAMILY holds policy, reference, reward and critic, CHECKPOINTS/FAMILY-converted the same as torch_dist.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.convert.forward import huggingface_logits, packed_micro_batch, random_prompts
from hybridflow.models import pipeline
from hybridflow.models.build import build_model
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.platform import Platform
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.cases import CHANGES, FAMILIES
from tests.distributed.parity_worker import or_error
from tests.distributed.ppo_worker import config, layout, run

LOGIT_LAYOUTS = {"tp1": (1, 1, 2), "tp2": (2, 1, 1), "pp2": (1, 2, 1)}
LAYOUTS = {"actor": layout(2), "critic": layout(1, 2), "reward": layout(1, 1, 2), "reference": layout(2)}
ROLLOUTS = {"in place": {"tensor_parallel_size": 2}, "gathered": {"tensor_parallel_size": 1}}
NEW_FAMILIES = [family for family in FAMILIES if family not in ("llama", "qwen2", *CHANGES)]

# What a converted checkpoint holds is compared for every family, by its logits; what trains with it does not depend on
# the family: one of experts, one whose gate and up projection vLLM cuts as it stands.
CONVERTED = ("glm", "mixtral")
KINDS = {family: ("huggingface", "converted") if family in CONVERTED else ("huggingface",) for family in NEW_FAMILIES}


def main(checkpoints: Path, prompts: Path, out: Path) -> None:
    platform = platforms.start(seed=0)
    results: dict[str, Any] = {"logits": {}}
    for family in FAMILIES:
        results["logits"][family] = or_error(lambda family=family: logits(checkpoints, family, platform))
    for family in NEW_FAMILIES:
        for kind in KINDS[family]:
            models = checkpoints / (family if kind == "huggingface" else f"{family}-converted")
            rollout = ROLLOUTS["in place" if kind == "huggingface" else "gathered"]
            whole = once(config(models, prompts, LAYOUTS, rollout))
            results[f"{family}/{kind}"] = or_error(lambda whole=whole: two_iterations(whole))
            gc.collect()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    platforms.stop()


def two_iterations(config: ExperimentConfig) -> list[dict[str, float]]:
    trainer = OnlineTrainer(config)
    found = [run(trainer, iteration) for iteration in (1, 2)]
    trainer.generator.engine.close()
    return found


def once(config: ExperimentConfig) -> ExperimentConfig:
    """With one epoch an iteration, of two mini-batches: the second step's ratios are not one any more."""
    update = config.algorithm.update.model_copy(update={"epochs": 1})
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"update": update})})


def logits(checkpoints: Path, family: str, platform: Platform) -> dict[str, float]:
    """Layout -> largest absolute difference between megatron's, from the converted policy, and HuggingFace's."""
    spec = read_spec(checkpoints / f"{family}-converted" / "policy")
    inputs = random_prompts(spec, seed=0)
    expected = huggingface_logits(checkpoints / family / "policy", inputs, trust_remote_code=False)
    found = {}
    for name, sizes in LOGIT_LAYOUTS.items():
        grid = Grid.build(Layout(*sizes, (0, 1)), ProcessGroups())
        found[name] = float((whole_logits(spec, inputs, grid, platform) - expected).abs().max())
    return found


def whole_logits(spec: ModelSpec, inputs: list[Tensor], grid: Grid, platform: Platform) -> Tensor:
    """Of all tokens, on every rank."""
    options = dict(dtype="float32", sequence_parallel=False, recompute="none", device=platform.device)
    chunks = build_model(spec, grid, head="lm", **options)
    batch = packed_micro_batch(inputs, platform.device)
    results = pipeline.forward(chunks, grid, [batch], lambda output, _: {"logits": output.logits()})
    if grid.is_last_stage:
        own = results[0]["logits"]
        columns = [torch.empty_like(own) for _ in range(grid.tp)]
        dist.all_gather(columns, own, group=grid.groups.tp)
        logits = torch.cat(columns, dim=-1)[:, : spec.vocab_size].contiguous()
    else:
        logits = torch.empty(sum(map(len, inputs)), spec.vocab_size)
    dist.broadcast(logits, src=1, group=dist.group.WORLD)  # the last rank has them in every layout
    return logits


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
