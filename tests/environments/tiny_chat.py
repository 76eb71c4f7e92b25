"""Random checkpoints whose tokenizer has a chat template and tool calls that a random model writes: a token each."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import make_checkpoints

CHARACTERS = "0123456789+-=*?! abcdefghijklmnopqrstuvwxyz.:'<>"
ROLES = ("user", "assistant", "tool", "system")
END = "<|end|>"


def call_text(name: str, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


CALLS = (
    call_text("add", {"a": 1, "b": 2}),
    call_text("add", {"a": 4, "b": 5}),
    call_text("fails", {"n": 3}),
    call_text("unknown", {}),
    "<tool_call>{broken</tool_call>",
)
TEMPLATE = (
    "{%- if tools -%}<|system|>{%- for tool in tools -%}{{ tool.function.name }} {% endfor -%}<|end|>{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{%- endfor -%}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    vocabulary |= {character: len(vocabulary) + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(f"<|{role}|>", special=True) for role in ROLES])
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(call, normalized=False) for call in CALLS])
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    found.chat_template = template
    return found


def make_chat_inputs(
    directory: Path, *, num_rows: int = 16, template: str = TEMPLATE, family: str = "llama", **model: Any
) -> Path:
    """DIRECTORY with checkpoints, train.jsonl and heldout.jsonl, of rows {"question", "answer"}. model: its sizes."""
    make_checkpoints(directory, family=family, tied=False, head_dim=32, max_length=256, **model)
    for name in ("policy", "reference", "reward", "critic"):
        make_tokenizer(template).save_pretrained(directory / name)
    rows = [{"question": f"{i}+{i % 7}=", "answer": str(i + i % 7)} for i in range(num_rows)]
    for name, some in (("train", rows), ("heldout", rows[:5])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return directory


STOPS = list(range(4, 14))  # a random model seldom writes a certain token; these are the digits


def run_config(root: Path, max_response_length: int) -> dict[str, Any]:
    """GRPO over two iterations on what `make_chat_inputs` has made."""
    return {
        "name": "run",
        "seed": 1,
        "output_dir": str(root / "runs"),
        "num_iterations": 2,
        "data": {
            "train": str(root / "train.jsonl"),
            "heldout": str(root / "heldout.jsonl"),
            "chat_template": True,
            "prompts_per_iteration": 4,
            "max_prompt_length": 32,
            "shuffle": False,
        },
        "sampling": {"samples_per_prompt": 4, "max_response_length": max_response_length, "stop_token_ids": STOPS},
        "actor": {"model": str(root / "policy"), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        "critic": None,
        "rollout": {"kv_cache_gib": 0.0625},
        "algorithm": {"name": "grpo", "kl": {"use": "none"}, "update": {"mini_batch_size": 8}},
        "metrics": {"tensorboard": False, "dump_batches": True},
        "checkpoint": {"load": "none"},
    }
