"""Llama models of random weights, and batches for them: what overheads are measured with."""

from pathlib import Path

import torch

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.config import ExperimentConfig
from hybridflow.placement.placed import PlacedRun, place

VOCAB_SIZE = 256
HEAD_DIM = 32  # the least that vLLM's attention takes on a CPU
PROMPT = 8


def make_model(directory: Path, *, hidden: int, layers: int, positions: int, vocabulary: int = VOCAB_SIZE) -> Path:
    """Of 4 hidden sizes in the MLP, as many heads as go into the hidden size."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM,
        max_position_embeddings=positions,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def placed_run(
    model: Path, *, tp: int = 1, dp: int = 1, dtype: str, length: int, budget: int, output_dir: Path
) -> PlacedRun:
    """An actor and an engine on the first tp x dp ranks."""
    config = ExperimentConfig.model_validate(
        {
            "name": "profile",
            "num_iterations": 1,
            "output_dir": str(output_dir),
            "data": {"train": "none", "prompts_per_iteration": 32, "max_prompt_length": PROMPT},
            "sampling": {"max_response_length": length - PROMPT, "samples_per_prompt": 2, "ignore_eos": True},
            "actor": {
                "model": str(model),
                "dtype": dtype,
                "tensor_parallel_size": tp,
                "micro_batch_tokens": budget,
                "optimizer": {"lr": 1e-6},
            },
            "reward": {"functions": [{"function": "hybridflow.rewards.numeric:exact_match"}]},
            "algorithm": {"name": "grpo", "kl": {"use": "none"}},
            "rollout": {"kv_cache_gib": 0.0625, "score_while_waiting": False},
        }
    )
    return place(config, tp * dp)


def batch(rows: int, response: int) -> RolloutBatch:
    """Rows of `PROMPT` and `response` random tokens, each with a prompt of its own."""
    lengths, prompts = torch.full((rows,), PROMPT + response), torch.full((rows,), PROMPT)
    size = int(lengths.sum())
    return RolloutBatch(
        torch.randint(0, VOCAB_SIZE, (size,)),
        lengths,
        prompts,
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.bool),
        response_mask=response_mask(lengths, prompts),
        rollout_log_probs=torch.zeros(size),
    )
