"""What engines record of the experts of each token, beside what transformers chooses.

torchrun --nproc-per-node 2 -m tests.rollout.routing_worker CHECKPOINTS OUT CASE ...
"""

import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.architecture.spec import read_spec
from hybridflow.config import RolloutConfig, SamplingConfig
from hybridflow.cpu.engine.device import CpuEngine
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.placement.kv_cache import tokens_of_block
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.patches import join_groups
from tests.distributed.engine_weights import single_steps, vllms_own_loader
from tests.rollout.responses import responses_of

NUM_RANKS, NUM_LAYERS, MAX_LENGTH, KV_BYTES = 2, 3, 160, 1 << 23
WHOLE: Stages = ((0, 1, 2),)
SAMPLING = SamplingConfig(max_response_length=12, temperature=0.9, ignore_eos=True)
ENDS = SAMPLING.model_copy(update={"stop_token_ids": tuple(range(4, 20))})


@dataclass(frozen=True)
class Case:
    """chunk: tokens of a step, where a prompt may be read in several. samples: to each prompt."""

    family: str
    tp: int = 1
    pp: int = 1
    replicas: tuple[tuple[int, ...], ...] = ((0,), (1,))
    stages: Stages = WHOLE
    samples: int = 1
    chunk: int | None = None
    several_steps: bool = True
    sampling: SamplingConfig = SAMPLING
    kv_bytes: int = KV_BYTES
    prompt_lengths: tuple[int, ...] = (9, 100, 33, 70)


SHARED = {"samples": 3, "prompt_lengths": (100, 70, 9)}  # blocks of 32 tokens: three, two and none are cached
CASES = {
    "qwen3_moe": Case("qwen3_moe"),
    "mixtral": Case("mixtral", sampling=ENDS),
    "shared prompts": Case("qwen3_moe", **SHARED),
    "shared prompts, mixtral": Case("mixtral", **SHARED),
    "single steps": Case("qwen3_moe", several_steps=False, **SHARED),
    "chunks": Case("qwen3_moe", chunk=40, **SHARED),
    "full cache": Case("qwen3_moe", samples=3, prompt_lengths=(60, 61, 62), kv_bytes=9 * 3 * 2**16),
    "stages": Case("qwen3_moe", pp=2, replicas=((0, 1),), stages=((0,), (1, 2)), **SHARED),
    # where other layers keep a state, of which no prefix is cached
    "states": Case("qwen3_5_moe", **SHARED),
    "states, tensor parallel": Case("qwen3_5_moe", tp=2, replicas=((0, 1),), **SHARED),
    "groups of experts": Case("deepseek_v3"),
    "latent attention in stages": Case("glm4_moe_lite", pp=2, replicas=((0, 1),), stages=((0, 1), (2,))),
    "tensor parallel": Case("mixtral", tp=2, replicas=((0, 1),), **SHARED),
}


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    results = {name: run(CASES[name], checkpoints, platform) for name in CASES if name in names}
    everyone: list = [None] * platform.world_size
    dist.all_gather_object(everyone, results)
    if platform.rank == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


def run(case: Case, checkpoints: Path, platform: platforms.Platform) -> dict[str, object]:
    """Of this rank: choices that differ from transformers', choices, cached tokens, preemptions."""
    layout = RolloutLayout(case.tp, case.pp, case.replicas)
    join_groups(layout, case.stages, platform.local_rank)
    model = AutoModelForCausalLM.from_pretrained(checkpoints / case.family / "policy")
    with chunked(case.chunk), vllms_own_loader():
        engine = build(case, layout, checkpoints / case.family / "policy", platform)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 100, (length,), generator=generator).tolist() for length in case.prompt_lengths]
    requests = [Request(prompt, seed) for prompt in prompts for seed in range(case.samples)]
    greedy = engine.params_at(0.0, case.sampling, ()) if case.chunk else engine.sampling_params(case.sampling, ())
    cached, scheduler = note_cached(engine), engine._engine.engine_core.engine_core.scheduler
    preempted = mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request)
    with contextlib.nullcontext() if case.several_steps else single_steps(), preempted as preempt:
        responses_of(engine, requests[:1], greedy)  # which leaves its prompt in the cache
        responses = responses_of(engine, requests, greedy)
    found: dict[str, object] = {
        "cached": sum(cached),
        "preempted": preempt.call_count,
        "cache_use": engine.cache_use.pop(),
        "cache_use_again": engine.cache_use.pop(),
        "told": sum(r.experts is not None for r in responses),
    }
    place = layout.coordinates(platform.rank)
    if place.tp == 0:
        different, total, layers = 0, 0, list(case.stages[place.pp])
        for request, response in zip(requests, responses, strict=True):
            expected = by_transformers(model, request.prompt + response.token_ids)[:-1]
            assert response.experts.shape == expected.shape and response.experts.dtype == torch.uint8
            others = [layer for layer in range(NUM_LAYERS) if layer not in layers]
            assert not response.experts[:, others].any(), "of other stages"
            mine = response.experts[:, layers].long().sort().values
            different += int((mine != expected[:, layers].sort().values).sum())
            total += mine.numel()
        found |= {"different": different, "total": total, "lengths": [len(r.token_ids) for r in responses]}
    engine.close()
    return found


def no_source(name: str) -> Tensor:
    raise AssertionError(f"vLLM's own loader asks nobody for {name}")


def build(case: Case, layout: RolloutLayout, directory: Path, platform: platforms.Platform) -> RolloutEngine:
    at, spec = layout.coordinates(platform.rank), read_spec(directory)
    return RolloutEngine(
        directory,
        no_source,
        dtype="float32",
        language_model=LanguageModel.of(spec),
        layout=layout,
        stages=case.stages,
        max_length=MAX_LENGTH,
        sampling=case.sampling,
        config=RolloutConfig(max_num_seqs=8, max_num_batched_tokens=case.chunk or 512),
        kv_cache_bytes=case.kv_bytes * len(case.stages[at.pp]) // max(map(len, case.stages)),
        block_tokens=tokens_of_block(spec, cuda=False),
        platform=platform,
        routing=RoutingSizes(spec.num_layers, spec.experts_per_token, spec.num_experts),
    )


@contextlib.contextmanager
def chunked(chunk: int | None) -> Iterator[None]:
    """An engine that is built within the block may read a prompt in several steps, as on GPUs."""
    settings = CpuEngine.settings

    def changed(*args: object, **named: object) -> dict:
        return {**settings(*args, **named), "enable_chunked_prefill": True}

    with mock.patch.object(CpuEngine, "settings", settings if chunk is None else changed):
        yield


def note_cached(engine: RolloutEngine) -> list[int]:
    """The tokens that the prefix cache supplies to each request, from here on."""
    manager, found = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager, list[int]()
    look = manager.get_computed_blocks

    def noting(request: object) -> tuple:
        blocks, num_tokens, boundary = look(request)
        found.append(num_tokens)
        return blocks, num_tokens, boundary

    manager.get_computed_blocks = noting
    return found


@functools.cache
def routers(model: torch.nn.Module) -> dict[int, Tensor]:
    """The choice of each layer in the last forward pass."""
    found: dict[int, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):  # a dense layer, which has no record
            continue
        layer.mlp.gate.register_forward_hook(lambda gate, args, out, number=number: found.update({number: out[2]}))
    return found


@torch.no_grad()
def by_transformers(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """(tokens, layers, k)."""
    found = routers(model)
    model(torch.tensor([ids]))
    nothing = torch.zeros_like(found[NUM_LAYERS - 1])
    return torch.stack([found.get(layer, nothing) for layer in range(NUM_LAYERS)], 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
