"""Runs that others have published, and runs of hybridflow on one H100: layouts, lengths, seconds, and where they stand.

Of NeMo RL a page has tokens/s/GPU, seconds of a step and the mean response; prompts are what is left of the tokens. The
recipes beside the page have the rest. No figure here is computed by the model of time.
"""

from dataclasses import dataclass, field
from typing import Any

NEMO_PAGES = {
    "0.4": ("92a84d53de45935554aadf9abc69bce1dd4ae764", "2025-12-01"),
    "0.5": ("6c7089300fded94abfa49bb9cbf9eb357d862461", "2026-01-30"),
    "0.6": ("5fb588932bf835506a8a5bac01de4f8c7ab0a065", "2026-04-29"),
}
NEMO_URL = "https://github.com/NVIDIA-NeMo/RL/blob/{commit}/docs/about/performance-summary.md"


@dataclass(frozen=True)
class NemoRun:
    """GRPO on policy on H100s. rate: tokens/s/GPU; response: its mean; limit: of prompt and response together.

    score_tokens: of a micro-batch of the reference, in limits.
    """

    version: str
    model: str  # of configs/shapes
    gpus: int
    actor: dict[str, Any]
    engine_tp: int
    prompts: int
    response: float
    limit: int
    rate: float
    seconds: float
    score_tokens: int
    assumed: str = ""

    @property
    def sequences(self) -> int:
        return self.prompts * 32

    @property
    def prompt(self) -> float:
        return self.rate * self.gpus * self.seconds / self.sequences - self.response

    @property
    def source(self) -> str:
        commit, date = NEMO_PAGES[self.version]
        return f"[NeMo RL {self.version}, {date}]({NEMO_URL.format(commit=commit)})"


PP2 = {"pipeline_parallel_size": 2, "recompute": "full"}
TP4_PP4 = {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "sequence_parallel": True}
EP8 = {"expert_parallel_size": 8}
TP2_EP8 = {"tensor_parallel_size": 2, "expert_parallel_size": 8, "sequence_parallel": True}
TP4_PP8_EP16 = {
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 8,
    "expert_parallel_size": 16,
    "sequence_parallel": True,
    "num_layers_in_first_pipeline_stage": 11,
    "num_layers_in_last_pipeline_stage": 11,
    "recompute": "full",
}
NO_CP = "tp 4 in place of tp 2 x cp 2"
NEMO_RUNS = (
    NemoRun("0.4", "llama-3-8b", 16, PP2, 1, 64, 1060, 4096, 1562, 97.7, 2),
    NemoRun("0.5", "llama-3-8b", 16, PP2, 1, 64, 1019, 4096, 1581, 92.8, 2),
    NemoRun("0.4", "qwen3-32b", 32, TP4_PP4, 4, 64, 3206, 4096, 540, 393, 4),
    NemoRun("0.5", "qwen3-32b", 32, TP4_PP4, 4, 64, 3251, 4096, 571, 376, 4),
    NemoRun("0.4", "qwen3-30b-a3b", 32, TP2_EP8, 4, 64, 3154, 4096, 925, 225, 4),
    NemoRun("0.5", "qwen3-30b-a3b", 32, EP8, 2, 64, 3196, 4096, 1066, 198, 4),
    NemoRun("0.6", "qwen3-30b-a3b", 32, EP8, 2, 64, 3203, 4096, 1102, 192, 4),
    NemoRun("0.4", "qwen3-235b-a22b", 128, TP4_PP8_EP16, 16, 16, 5671, 8192, 45.7, 506, 1, NO_CP),
    NemoRun("0.5", "qwen3-235b-a22b", 128, TP4_PP8_EP16, 16, 16, 5700, 8192, 54.1, 431, 1, NO_CP),
    NemoRun("0.6", "qwen3-235b-a22b", 128, TP4_PP8_EP16, 16, 16, 5698, 8192, 58.9, 395, 1, NO_CP),
    NemoRun("0.6", "qwen3-235b-a22b", 256, TP4_PP8_EP16, 16, 16, 5713, 8192, 37.4, 312, 1, NO_CP),
)


@dataclass(frozen=True)
class Latency:
    """Eight prompts of 32 tokens, 128 tokens each, on H200s."""

    model: str
    tp: int
    seconds: float


VLLM = "vLLM, buildkite.com, vllm, performance-benchmark, build 9515"
LATENCIES = (Latency("llama-3-8b", 1, 0.833421), Latency("llama-3.3-70b", 4, 2.07753))


@dataclass(frozen=True)
class OwnRun:
    """On one H100, docs/explanation/gpus.md. seconds: by phase; "" is the iteration."""

    what: str
    config: dict[str, Any]
    seconds: dict[str, float]
    fitted: dict[str, str] = field(default_factory=dict)  # phases that a constant comes from, and which


LLAMA_1B = "configs/shapes/llama-3.2-1b"
WRITTEN: dict[str, dict[str, Any]] = {  # config.json of models without a directory in configs/shapes
    "llama-3.2-1b-reward": {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
    "mixture-2.7b": dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=32000)
    | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=32)
    | dict(num_key_value_heads=4, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-6)
    | dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True)
    | dict(decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False),
}
OPTIMIZER = {"lr": 1e-4}
REWARD = {"functions": [{"function": "hybridflow.rewards.numeric:numeric_match"}]}


def _data(prompts: int, length: int) -> dict[str, Any]:
    return {"train": "none", "prompts_per_iteration": prompts, "max_prompt_length": length}


def _sampling(samples: int, length: int) -> dict[str, Any]:
    return {"samples_per_prompt": samples, "max_response_length": length, "ignore_eos": True}


def _of(model: str, tokens: int, *, trained: bool = False) -> dict[str, Any]:
    return {"model": model, "micro_batch_tokens": tokens} | ({"optimizer": OPTIMIZER} if trained else {})


OWN_RUNS = (
    OwnRun(
        "GRPO, 1B, 64 x 8 x (128 + 256)",
        {
            "data": _data(64, 128),
            "sampling": _sampling(8, 256),
            "actor": _of(LLAMA_1B, 16384, trained=True),
            "reference": _of(LLAMA_1B, 16384),
            "reward": REWARD,
            "rollout": {"kv_cache_gib": 8, "max_num_seqs": 256},
            "algorithm": {"name": "grpo"},
        },
        {"": 8.5, "generate": 4.5, "reference": 1.03, "actor_update": 2.91},
        {"": "", "generate": "engine_sequence", "reference": "efficiency"}
        | {"actor_update": "efficiency, gradient_bandwidth"},
    ),
    OwnRun(
        "PPO, four 1B models, 256 x (128 + 256)",
        {
            "data": _data(256, 128),
            "sampling": _sampling(1, 256),
            "actor": _of(LLAMA_1B, 8192, trained=True),
            "critic": _of("llama-3.2-1b-reward", 8192, trained=True),
            "reference": _of(LLAMA_1B, 8192),
            "reward": {"models": [_of("llama-3.2-1b-reward", 8192)]},
            "rollout": {"kv_cache_gib": 8, "max_num_seqs": 256},
            "algorithm": {"name": "ppo", "update": {"mini_batch_size": 128}},
        },
        {"generate": 2.4, "reward": 0.40, "log_probs": 0.62, "reference": 0.62, "values": 0.41}
        | {"critic_update": 1.45, "actor_update": 1.91},
    ),
    OwnRun(
        "GRPO, mixture of 2.7B, 32 x 8 x (64 + 192)",
        {
            "data": _data(32, 64),
            "sampling": _sampling(8, 192),
            "actor": _of("mixture-2.7b", 8192, trained=True),
            "reward": REWARD,
            "rollout": {"kv_cache_gib": 4, "max_num_seqs": 256},
            "algorithm": {"name": "grpo", "kl": {"use": "none"}},
        },
        {"actor_update": 0.88},
        {"actor_update": "grouped_efficiency"},
    ),
)
