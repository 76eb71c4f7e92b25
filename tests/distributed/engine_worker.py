"""Build engines of many layouts one after the other; compare each with HuggingFace. The engine without a trainer.

torchrun --nproc-per-node 4 -m tests.distributed.engine_worker CHECKPOINTS OUT CASE ...     CASE may be REBUILD
"""

import functools
import json
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridflow.architecture.mixers.attention import CPU_BLOCK
from hybridflow.architecture.spec import read_spec
from hybridflow.config import RolloutConfig, SamplingConfig
from hybridflow.cpu.engine import decoder, patches
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.patches import join_groups
from hybridflow.rollout.row import RolloutRow
from tests.distributed.engine_weights import EngineShards, single_steps, vllms_own_layers, vllms_own_loader
from tests.rollout.responses import responses_of

NUM_RANKS = 4
NUM_LAYERS = 3
NUM_PROMPTS = 4
PROMPT_LENGTHS = (9, 120, 33, 124, 5, 140, 121)  # replica i has four from the i-th on; a block holds 32 tokens
MAX_LENGTH = 256
WHOLE: Stages = ((0, 1, 2),)
EARLY: Stages = ((0,), (1, 2))  # vLLM by itself would cut the other way
LATE: Stages = ((0, 1), (2,))
SAMPLING = SamplingConfig(max_response_length=12, temperature=0.7, ignore_eos=True)
LONGER = SamplingConfig(max_response_length=24, temperature=0.9, ignore_eos=True)
WAYS = {  # of sampling, for several steps at once beside single ones
    "of one length": {},
    "ends": {"stop_token_ids": tuple(range(4, 12)), "min_response_length": 3},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.3, "stop_token_ids": (5, 50)},
    "likeliest": {"top_k": 5, "top_p": 0.8},
}
CONFIG = RolloutConfig(max_num_seqs=8, max_num_batched_tokens=256)
KV_CACHE_GIB = 1 / 128
NUM_REBUILDS = 6


@dataclass(frozen=True)
class Case:
    model: str
    tp: int
    pp: int
    replicas: tuple[tuple[int, ...], ...]
    stages: Stages = WHOLE
    dtype: str = "float32"
    kv_cache_gib: float = KV_CACHE_GIB
    directory: str = "policy"  # that vLLM is given

    @property
    def layout(self) -> RolloutLayout:
        return RolloutLayout(self.tp, self.pp, self.replicas)

    @property
    def ways(self) -> dict[str, dict]:
        """Of sampling, for several steps at once: all of them where they are quick."""
        if self.pp > 1:
            return {}
        return WAYS if self.tp == 1 else {name: WAYS[name] for name in ("of one length", "ends")}


CASES = {
    "tp1": Case("llama", 1, 1, ((0,), (1,), (2,), (3,))),
    "tp2 at intervals": Case("llama", 2, 1, ((0, 2), (1, 3))),
    "tp4 replicated kv": Case("few_kv", 4, 1, ((0, 1, 2, 3),)),
    "pp2 apart": Case("llama", 1, 2, ((0, 2), (1, 3)), EARLY),
    "pp2 apart tied": Case("qwen2", 1, 2, ((0, 2), (1, 3)), LATE),
    "tp2 pp2 at intervals": Case("qwen2", 2, 2, ((0, 2, 1, 3),), EARLY),
    # 13 blocks, one of them vLLM's own: enough to start on four prompts, not to end on them
    "pp2 full cache": Case("llama", 1, 2, ((0, 2), (1, 3)), EARLY, kv_cache_gib=13 * 2 * 2**15 / 2**30),
    "full cache": Case("llama", 1, 1, ((0,), (1,), (2,), (3,)), kv_cache_gib=13 * 3 * 2**15 / 2**30),
    "odd ranks": Case("qwen2", 2, 1, ((1, 3),)),
    # config.json says tied; vLLM finds no weights there that say otherwise
    "own head": Case("own_head", 1, 2, ((0, 2), (1, 3)), EARLY, directory="without_weights"),
    "bfloat16": Case("llama", 2, 1, ((0, 1), (2, 3)), dtype="bfloat16"),  # against vLLM's own loader
}


REBUILD = "rebuild"


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    results = {name: run(CASES[name], checkpoints, platform) for name in CASES if name in names}
    if REBUILD in names:
        results[REBUILD] = rebuild(checkpoints, platform)
    everyone = [None] * platform.world_size
    dist.all_gather_object(everyone, results)
    if platform.rank == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


def run(case: Case, checkpoints: Path, platform: platforms.Platform) -> dict | None:
    """The case on its ranks; the others go straight to a collective of the world and wait there."""
    join_groups(case.layout, case.stages, platform.local_rank)
    record = check(case, checkpoints, platform) if platform.rank in case.layout else None
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.group.WORLD)
    assert total.item() == platform.world_size
    return record


def build(case: Case, checkpoints: Path, platform: platforms.Platform, sleep_level: int = 1) -> RolloutEngine:
    at, model = case.layout.coordinates(platform.rank), huggingface(checkpoints, case.model, case.dtype)
    return RolloutEngine(
        checkpoints / case.model / case.directory,
        EngineShards(model.state_dict(), model.config.num_key_value_heads, at.tp, case.tp),
        dtype=case.dtype,
        language_model=LanguageModel.of(read_spec(checkpoints / case.model / "policy")),
        layout=case.layout,
        stages=case.stages,
        max_length=MAX_LENGTH,
        sampling=SAMPLING,
        config=CONFIG.model_copy(update={"sleep_level": sleep_level}),
        kv_cache_bytes=int(case.kv_cache_gib * 2**30) * len(case.stages[at.pp]) // max(map(len, case.stages)),
        block_tokens=CPU_BLOCK,
        platform=platform,
    )


def check(case: Case, checkpoints: Path, platform: platforms.Platform) -> dict:
    engine = build(case, checkpoints, platform)
    record = {
        "parameters": sorted(engine.parameters()),
        "blocks": engine._engine.vllm_config.cache_config.num_gpu_blocks,
        "strides_in_key": "hybridflow_weights" in engine._model_runner().model.model.vllm_config.additional_config,
    }
    replica = case.layout.coordinates(platform.rank).replica
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts()[replica : replica + NUM_PROMPTS])]
    greedy = responses_of(engine, requests, engine.params_at(0.0, SAMPLING, ()))
    with mock.patch.object(platforms.Platform, "synchronize") as wait:
        sampled = responses_of(engine, requests, engine.sampling_params(SAMPLING, ()))
    record["waits"] = wait.call_count
    record["sampled"] = [drawn.token_ids for drawn in sampled]
    record |= beside_vllms_own_layers(engine, requests, sampled)
    record["steps"] = beside_single_steps(engine, case, replica)
    if case.dtype == "float32":
        record |= against_huggingface(huggingface(checkpoints, case.model, case.dtype), requests, greedy, sampled)
    record |= sleep_and_wake(engine, requests, [response.token_ids for response in greedy])
    model = weakref.ref(engine._model_runner().model)
    engine.close()
    record["collected"] = model() is None
    if case.dtype == "bfloat16":
        with vllms_own_loader():
            other = build(case, checkpoints, platform)
        record["as_vllm_loads_it"] = greedy == responses_of(other, requests, other.params_at(0.0, SAMPLING, ()))
        record["as_vllm_loads_it"] &= sampled == responses_of(other, requests, other.sampling_params(SAMPLING, ()))
        other.close()
    return record


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 100, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def against_huggingface(model: PreTrainedModel, requests: list, greedy: list, sampled: list) -> dict:
    """Whether each greedy response is right, and the differences of the sampled tokens' log-probs."""
    right, differences = [], []
    for request, likeliest, drawn in zip(requests, greedy, sampled, strict=True):
        right.append(likeliest.token_ids == greedy_tokens(model, tuple(request.prompt)))
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + drawn.token_ids])).logits[0, len(request.prompt) - 1 : -1]
        expected = torch.log_softmax(logits.float() / SAMPLING.temperature, -1)
        expected = expected.gather(1, torch.tensor(drawn.token_ids)[:, None])[:, 0]
        differences.append((expected - torch.tensor(drawn.log_probs)).abs())
    difference = torch.cat(differences)
    return {
        "right": right,
        "difference": float(difference.max()),
    }


@functools.cache
def greedy_tokens(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    tokens = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=SAMPLING.max_response_length,
        attention_mask=torch.ones(1, len(prompt)),
        eos_token_id=None,
    )
    return tokens[0, len(prompt) :].tolist()


def beside_vllms_own_layers(engine: RolloutEngine, requests: list[Request], sampled: list[RolloutRow]) -> dict:
    """The same again, counting layers that are one call; then with vLLM's layers and sampler in their place."""
    params, calls = engine.sampling_params(SAMPLING, ()), []
    call, take = decoder.DecoderLayer.compute, patches.draw
    with (
        mock.patch.object(decoder.DecoderLayer, "compute", lambda *a: calls.append("layer") or call(*a)),
        mock.patch.object(patches, "draw", lambda *a: calls.append("draw") or take(*a)),
    ):
        again = responses_of(engine, requests, params)
    with vllms_own_layers():
        theirs = responses_of(engine, requests, params)
    pairs = [pair for a, b in zip(sampled, theirs, strict=True) for pair in zip(a.log_probs, b.log_probs, strict=True)]
    return {
        "again": again == sampled,
        "layer_calls": calls.count("layer"),
        "draws": calls.count("draw"),
        "vllms_tokens": [response.token_ids for response in theirs],
        "from_vllms": max(abs(a - b) for a, b in pairs),
    }


def beside_single_steps(engine: RolloutEngine, case: Case, replica: int) -> dict:
    """Of ways to sample: whether responses are the same to the bit, and how often the scheduler was asked."""
    own = prompts()[replica : replica + NUM_PROMPTS]
    requests = [Request(prompt, seed) for seed, prompt in enumerate(3 * own)]  # more than may run at once
    found = {}
    for name, changes in case.ways.items():
        params = engine.sampling_params(LONGER.model_copy(update=changes), ())
        responses, steps = _counted(engine, requests, params)
        with single_steps():
            single, of_single = _counted(engine, requests, params)
        lengths = [len(response.token_ids) for _, response in responses]
        found[name] = {"same": responses == single, "steps": steps, "of_single": of_single, "lengths": lengths}
    return found


def _counted(engine: RolloutEngine, requests: list[Request], params: list) -> tuple[list[tuple[int, RolloutRow]], int]:
    """The responses as they finish, and the engine's steps, from an empty cache."""
    engine.reset_prefix_cache()
    steps: list[None] = []
    return list(engine.stream(requests, params, stepped=lambda: steps.append(None))), len(steps)


def sleep_and_wake(engine: RolloutEngine, requests: list[Request], tokens: list[list[int]]) -> dict:
    """Bytes of the cache before, in and after sleep, and whether the same is generated with what comes back."""
    caches = engine._model_runner().kv_caches
    for cache in caches:
        cache.fill_(float("nan"))  # freed memory may come back with anything in it
    awake = cache_bytes(engine)
    engine.sleep()
    asleep = cache_bytes(engine)
    engine.wake_up()
    engine.reset_prefix_cache()
    again = responses_of(engine, requests, engine.params_at(0.0, SAMPLING, ()))
    return {
        "nbytes": [awake, asleep, cache_bytes(engine)],
        "same_after_sleep": [response.token_ids for response in again] == tokens,
    }


def cache_bytes(engine: RolloutEngine) -> int:
    """Of the storages under the layers' caches, each once, and nothing of those that are shrunk."""
    storages = [cache.untyped_storage() for cache in engine._model_runner().kv_caches]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def rebuild(checkpoints: Path, platform: platforms.Platform) -> dict:
    """Engines built and closed in turn: resident memory after each, and what a cache that never sleeps holds asleep."""
    resident, kept, seconds = [], [], []
    for number in range(NUM_REBUILDS):
        case = CASES[("tp2 at intervals", "pp2 apart tied")[number % 2]]
        join_groups(case.layout, case.stages, platform.local_rank)
        started = time.monotonic()
        engine = build(case, checkpoints, platform, sleep_level=0)
        seconds.append(time.monotonic() - started)
        responses_of(engine, [Request(prompts()[0], 0)], engine.params_at(0.0, SAMPLING, ()))
        engine.sleep()
        kept.append(cache_bytes(engine))
        engine.close()
        resident.append(psutil.Process().memory_info().rss)
    return {
        "resident": resident,
        "kept": kept,
        "seconds": seconds,
        "awake_at_the_end": close_asleep(checkpoints, platform),
    }


def close_asleep(checkpoints: Path, platform: platforms.Platform) -> bool:
    """Whether an engine that is closed in its sleep has its cache when vLLM frees it."""
    case, seen = CASES["tp2 at intervals"], []
    join_groups(case.layout, case.stages, platform.local_rank)
    engine = build(case, checkpoints, platform)
    core, awake = engine._engine.engine_core, cache_bytes(engine)
    shutdown = core.shutdown

    def shut_down() -> None:
        seen.append(cache_bytes(engine))
        shutdown()

    core.shutdown = shut_down
    engine.sleep()
    seen.append(cache_bytes(engine))
    engine.close()
    return seen == [0, awake]


@functools.cache
def huggingface(checkpoints: Path, model: str, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoints / model / "policy", dtype=getattr(torch, dtype)).eval()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
