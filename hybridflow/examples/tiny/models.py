"""The models of `make_tiny` and `stages`: how large they are, their random weights, and what they write."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridflow.examples.tiny.task import SPECIAL_PIECES, Problem, is_right, write_tokenizer, write_tools_tokenizer


@dataclass(frozen=True)
class Settings:
    """Sizes and targets. The tests make a smaller one."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4  # of 32 elements each, the least that vLLM takes
    num_key_value_heads: int = 2
    accuracy_range: tuple[float, float] = (0.2, 0.6)  # of the policy
    least_pair_accuracy: float = 0.98  # of the reward model; see make_tiny's REWARD
    num_policy_samples: int = 4096
    max_answer_tokens: int = 8
    num_validation: int = 512
    num_heldout: int = 256
    num_experts: int = 0  # of each layer, in place of the MLP; a token goes through two; 0: a dense model
    tools: bool = False  # a policy that calls a calculator, of another task


def write_start(directory: Path, settings: Settings, seed: int) -> None:
    """A tokenizer, and a Llama or Qwen3-MoE with random weights. All that is random follows from `seed`."""
    if settings.tools:
        write_tools_tokenizer(directory)
    else:
        write_tokenizer(directory, random.Random(seed))
    torch.manual_seed(seed)  # for the weights, which transformers draws from the global generator
    _model(settings, len(AutoTokenizer.from_pretrained(directory))).save_pretrained(directory)


def _model(settings: Settings, vocab_size: int) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.hidden_size // settings.num_heads,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.04,  # the usual 0.02 is for wider models and takes twice the steps here
        "tie_word_embeddings": False,
        "pad_token_id": SPECIAL_PIECES["pad"],
        "bos_token_id": SPECIAL_PIECES["bos"],
        "eos_token_id": SPECIAL_PIECES["eos"],
    }
    if not settings.num_experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    experts: dict[str, Any] = {"num_experts": settings.num_experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=settings.intermediate_size // 2)
    )


@dataclass(frozen=True)
class Policy:
    """A model that answers problems, all of whose prompts have as many tokens."""

    model: Any  # of transformers; `generate` is typed for a protocol that no model of transformers fulfils
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int  # of an answer

    @classmethod
    def load(cls, directory: Path, settings: Settings) -> "Policy":
        model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
        return cls(model, tokenizer, settings.max_answer_tokens)

    def answers(self, problems: list[Problem], *, sampled: bool = False) -> list[str]:
        """The likeliest token at each place, or drawn at temperature 1 from torch's global generator."""
        prompts = self.tokenizer([problem.prompt for problem in problems], return_tensors="pt")["input_ids"]
        how = {"do_sample": True, "top_k": 0, "temperature": 1.0} if sampled else {"do_sample": False}
        ids = self.model.generate(prompts, max_new_tokens=self.max_tokens, **how)
        return self.tokenizer.batch_decode(ids[:, prompts.shape[1] :], skip_special_tokens=True)

    def share_right(self, problems: list[Problem], *, sampled: bool = False) -> float:
        both = zip(self.answers(problems, sampled=sampled), problems, strict=True)
        return sum(is_right(text, problem.answer) for text, problem in both) / len(problems)

    def mistakes(self, problems: list[Problem]) -> dict[Problem, list[str]]:
        """What it writes that is wrong, by problem; nothing that is empty."""
        found: dict[Problem, list[str]] = {}
        for problem, text in zip(problems, self.answers(problems, sampled=True), strict=True):
            if text.strip() and not is_right(text, problem.answer):
                found.setdefault(problem, []).append(text)
        return found
