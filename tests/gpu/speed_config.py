"""Experiments whose speed is told, with models of random weights."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny_models import make_tokenizer

CPU_ONLY = {"HYBRIDFLOW_PLATFORM": "cpu"}


def speed_config(folder: Path, *, small: bool, experts: bool = False) -> Path:
    """GRPO on random weights of Llama-3.2-1B's shape: 64 prompts x 8 responses of 128 + 256 tokens; or a tiny one.

    experts: of a mixture of 2.7 B, of which 0.5 B are active.
    """
    prompts, samples, prompt, response, dtype = (4, 2, 8, 8, "float32") if small else (64, 8, 128, 256, "bfloat16")
    model, rows = folder / "model", folder / "train.jsonl"
    (_make_mixture if experts else _make_llama)(model, small=small)
    texts = ["".join(str((row * i + i // 7) % 10) for i in range(prompt)) for row in range(3 * prompts)]
    rows.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    config = {
        "name": "speed",
        "output_dir": str(folder),
        "num_iterations": 2 if small else 3,
        "data": {"train": str(rows), "prompts_per_iteration": prompts, "max_prompt_length": prompt},
        "sampling": {"samples_per_prompt": samples, "max_response_length": response, "ignore_eos": True},
        "actor": {"model": str(model), "dtype": dtype, "micro_batch_tokens": 40 if small else 16384},
        "reference": {"model": str(model), "dtype": dtype},
        "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
        "algorithm": {"name": "grpo"},
        "metrics": {"tensorboard": False},
    }
    config["actor"]["optimizer"] = {"lr": 1e-6}
    if small:
        config["rollout"] = {"kv_cache_gib": 1 / 64}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder / "config.yaml"


def _make_llama(directory: Path, *, small: bool) -> None:
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=100)
    if not small:
        sizes = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
        sizes |= dict(vocab_size=128256)
    heads = 2 if small else 8
    config = LlamaConfig(
        **sizes, num_key_value_heads=heads, head_dim=32 if small else 64, tie_word_embeddings=True, eos_token_id=2
    )
    with torch.device("cpu" if small else "cuda"):
        LlamaForCausalLM(config).to(torch.float32 if small else torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def _make_mixture(directory: Path, *, small: bool) -> None:
    """Of Qwen3-30B-A3B's sizes with 8 layers and 64 experts, so that weights and optimizer fit one GPU."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=100)
    of_experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    if not small:
        sizes = dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_attention_heads=32)
        sizes |= dict(vocab_size=32000)
        of_experts = dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768)
    config = Qwen3MoeConfig(
        **sizes,
        **of_experts,
        num_key_value_heads=2 if small else 4,
        head_dim=32 if small else 128,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    with torch.device("cpu" if small else "cuda"):
        Qwen3MoeForCausalLM(config).to(torch.float32 if small else torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
