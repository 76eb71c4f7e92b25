"""Published runs of other trainers and engines beside what `hybridflow.plan --time` would have said of them.

    python -m tests.bench.published

Each is laid out as its source says, with a shipped profile that nobody measured; the factor is published / predicted.
Of NeMo RL's runs the source has tokens/s/GPU, seconds and the mean response: prompts are what is left. Rows are taken
to be packed in budgets of one longest sequence, and a reference to be scored, as in the recipes' defaults.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridflow.architecture.spec import read_spec
from hybridflow.automap.cost import Device
from hybridflow.automap.device import load_profile
from hybridflow.automap.generation_time import Responses, generation_cost
from hybridflow.automap.timing import Work, predict
from hybridflow.config import ExperimentConfig
from hybridflow.parallel.layout import Cut
from hybridflow.placement.placed import place

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 128256}
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA
    | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    | dict(num_key_value_heads=8, max_position_embeddings=8192),
    "llama-70b": LLAMA
    | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    | dict(num_key_value_heads=8, max_position_embeddings=8192),
    "qwen3-32b": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", rms_norm_eps=1e-6, vocab_size=151936)
    | dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, head_dim=128)
    | dict(num_key_value_heads=8, max_position_embeddings=40960),
}
NEMO = "NeMo RL 0.4, docs/about/performance-summary.md, DGX-H100, GRPO on policy"
VLLM = "vLLM, buildkite.com/vllm/performance-benchmark/builds/9515, H200"


@dataclass(frozen=True)
class Iteration:
    """64 prompts x 32 responses, four optimizer steps. tokens: of a prompt, of a mean response, of the longest."""

    source: str
    model: str
    gpus: int
    actor: dict[str, Any]
    engine_tp: int
    tokens: tuple[float, float, int]
    seconds: float


@dataclass(frozen=True)
class Latency:
    """Eight prompts of 32 tokens, 128 tokens each."""

    source: str
    model: str
    tp: int
    seconds: float


ITERATIONS = (
    Iteration(
        NEMO,
        "llama-8b",
        16,
        dict(pipeline_parallel_size=2, recompute="full"),
        1,
        (1562 * 16 * 97.7 / 2048 - 1060, 1060, 3964),
        97.7,
    ),
    Iteration(
        NEMO,
        "qwen3-32b",
        32,
        dict(tensor_parallel_size=4, pipeline_parallel_size=4, sequence_parallel=True),
        4,
        (540 * 32 * 393 / 2048 - 3206, 3206, 3986),
        393,
    ),
)
LATENCIES = (Latency(VLLM, "llama-8b", 1, 0.833421), Latency(VLLM, "llama-70b", 4, 2.07753))


def main() -> None:
    table = Table(title="Seconds, published and predicted")
    for column in ("source", "model", "GPUs", "published", "predicted", "factor", "of it"):
        table.add_column(column, justify="left" if column in ("source", "model", "of it") else "right")
    with tempfile.TemporaryDirectory() as own:
        for name, fields in MODELS.items():
            directory = Path(own) / name
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(fields))
        for run in ITERATIONS:
            seconds, phases = iteration_seconds(run, Path(own))
            table.add_row(*cells(run.source, run.model, run.gpus, run.seconds, seconds), phases)
        for latency in LATENCIES:
            seconds = latency_seconds(latency, Path(own))
            table.add_row(*cells(latency.source, latency.model, latency.tp, latency.seconds, seconds), "")
    Console(width=150).print(table)


def cells(source: str, model: str, gpus: int, published: float, predicted: float) -> list[str]:
    return [source, model, str(gpus), f"{published:.2f}", f"{predicted:.2f}", f"{published / predicted:.2f}"]


def iteration_seconds(run: Iteration, root: Path) -> tuple[float, str]:
    profile, role = load_profile("h100-sxm"), {"model": str(root / run.model), "micro_batch_tokens": 4096}
    sizes = {key: value for key, value in run.actor.items() if key != "recompute"}
    prompt, mean, longest = run.tokens
    config = ExperimentConfig.model_validate(
        {
            "name": "published",
            "num_iterations": 1,
            "data": {"train": "none", "prompts_per_iteration": 64, "max_prompt_length": 4096 - longest},
            "sampling": {"max_response_length": longest, "samples_per_prompt": 32},
            "actor": role | run.actor | {"optimizer": {"lr": 1e-6}},
            "reference": role | sizes,
            "reward": {"functions": [{"function": "hybridflow.rewards.numeric:numeric_match"}]},
            "rollout": {"tensor_parallel_size": run.engine_tp, "kv_cache_gib": 40},
            "algorithm": {"name": "grpo", "kl": {"use": "loss"}, "update": {"mini_batch_size": 512}},
        }
    )
    work = Work(64, 32, prompt, mean, longest, profile.ranks_per_host)
    found = predict(place(config, run.gpus, cuda=True), profile, work)
    return found.seconds, ", ".join(f"{name} {value:.1f}" for name, value in found.phases.items() if value >= 0.05)


def latency_seconds(run: Latency, root: Path) -> float:
    responses = Responses(8, 8, prompt=32, mean=128, longest=128, at_once=256, batched_tokens=8192)
    device = Device(load_profile("h200"))
    spec = read_spec(root / run.model)
    cost = generation_cost(spec, cut=Cut(run.tp, run.tp), pp=1, dtype="bfloat16", responses=responses, device=device)
    return cost.seconds - device.profile.overheads.engine_wake


if __name__ == "__main__":
    main()
