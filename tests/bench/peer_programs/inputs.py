"""The models and prompts that all programs share.

Random Llama models are actor, critic and reward model. Where responses end by themselves the actor counts down: token
t is followed by t - 1, down to the end token, so that the last token of a prompt says how long the response will be.
The lengths are drawn once and are then those of every program and iteration, with each program's own sampling at
temperature 1 (about one response in 2000 goes astray).
"""

import json
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from tests.bench.peer_programs.workload import END, FIRST_WORD, NUM_PROMPTS, PAD, UNKNOWN, Size, Workload

CERTAINTY = 24.0  # the logit of the next token of the countdown; that of others has a deviation of this / sqrt(hidden)
SHORTEST, MEAN = 4, 40  # tokens of a response that ends by itself
TAIL = 1.35  # 1 is an exponential distribution; with this the longest of 64 has 256


def make_models(directory: Path, size: Size, *, ends: bool) -> None:
    """DIRECTORY/actor, /critic and /reward, each with the tokenizer."""
    disable_progress_bar()
    tokenizer = make_tokenizer(size.vocab)
    kinds = {
        "actor": LlamaForCausalLM,
        "reward": LlamaForSequenceClassification,
        "critic": LlamaForSequenceClassification,
    }
    for seed, (kind, model_class) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        model = model_class(llama_config(size, ends=ends))
        if kind == "actor" and ends:
            count_down(model)
        model.save_pretrained(directory / kind)
        tokenizer.save_pretrained(directory / kind)


def llama_config(size: Size, *, ends: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END if ends else None,
        num_labels=1,
    )


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """`tI` is token I."""
    special = {PAD: "[P]", UNKNOWN: "[U]", END: "[E]"}
    words = {special.get(i, f"t{i}"): i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[P]", unk_token="[U]", eos_token="[E]", padding_side="left"
    )


def count_down(model: LlamaForCausalLM) -> None:
    """Have token t followed by t - 1 down to END: the row of the output layer is the embedding of the token before.

    Embeddings of deviation 1 outweigh what the layers, of deviation 0.02, add to them.
    """
    embedding, output = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding.normal_()
    output.copy_(embedding.roll(-1, dims=0) * CERTAINTY / embedding.shape[1])


def response_lengths(workload: Workload) -> list[int]:
    """Of each prompt in the file: all the same, or quantiles of a Weibull distribution in random order."""
    if not workload.ends:
        return [workload.max_response] * NUM_PROMPTS
    quantiles = [(i + 0.5) / NUM_PROMPTS for i in range(NUM_PROMPTS)]
    random.Random(11).shuffle(quantiles)
    scale = (MEAN - SHORTEST) / math.gamma(1 + TAIL)
    return [min(SHORTEST + round(scale * (-math.log(q)) ** TAIL), workload.max_response) for q in quantiles]


def make_prompts(path: Path, workload: Workload, vocab: int) -> None:
    """Words drawn evenly; where responses end by themselves the last one is that of the length."""
    draw = random.Random(7)
    lines = []
    for length in response_lengths(workload):
        count = draw.randint(workload.min_prompt, workload.max_prompt)
        ids = [draw.randrange(FIRST_WORD, vocab) for _ in range(count)]
        if workload.ends:
            ids[-1] = END + length
        lines.append(json.dumps({"prompt": " ".join(f"t{i}" for i in ids)}))
    path.write_text("\n".join(lines))
