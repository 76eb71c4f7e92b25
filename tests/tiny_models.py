"""Small random checkpoints in HuggingFace format, and a character tokenizer, made from a seed."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

CHARACTERS = "0123456789+-=* "
VOCAB_SIZE = 100  # no multiple of 64: the padding rows must not matter
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    vocabulary |= {character: len(vocabulary) + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_checkpoints(
    directory: Path,
    *,
    family: str,
    tied: bool,
    head_dim: int = 8,
    num_layers: int = 2,
    num_kv_heads: int = 4,
    max_length: int = 128,
    seed: int = 0,
) -> Path:
    """DIRECTORY/{policy,reference,reward,critic}: the same architecture, other weights. Biases and norms are random."""
    config_class, lm_class, score_class = FAMILIES[family]
    for number, name in enumerate(("policy", "reference", "reward", "critic")):
        torch.manual_seed(100 * seed + number)
        config = config_class(
            vocab_size=VOCAB_SIZE,
            hidden_size=8 * head_dim,
            intermediate_size=96,
            num_hidden_layers=num_layers,
            num_attention_heads=8,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_length,
            tie_word_embeddings=tied and number < 2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=3,
            num_labels=1,
        )
        model = (lm_class if number < 2 else score_class)(config)
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if parameter_name.endswith("bias") else 1.0
                torch.nn.init.normal_(parameter, mean=centre, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(directory / name)
        make_tokenizer().save_pretrained(directory / name)
    return directory


def make_prompts(path: Path, count: int, seed: int = 0) -> Path:
    """Sums of two numbers, one a line."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            a, b = rng.randrange(1000), rng.randrange(100)
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    return path
