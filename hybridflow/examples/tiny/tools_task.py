"""The task of the quickstart with tools: products that no tiny model knows, and a calculator that does.

A question is "47*29"; the model asks for `multiply` with 47 and 29, reads 1363, and says 1363. A half-trained model
writes the form of a call and copies half of the digits wrong: what reinforcement learning then mends.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.examples.tiny.task import CHARACTERS, SPECIAL_PIECES, write_lines

SMALLEST, LARGEST = 10, 99
NUM_VALIDATION, NUM_HELDOUT = 512, 256
ROLES = ("user", "assistant", "tool")
END = "<|end|>"
# the parts of a call that are always the same: a token each, so that a call is as long as what the model has to choose
CALL = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
TEMPLATE = (
    "{#- The tiny model knows its only tool: a template for others would render the tools here. -#}"
    "{%- set tools_are_known = true -%}"
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{%- for call in message.tool_calls or [] -%}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{%- endfor -%}"
    "<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


@dataclass(frozen=True)
class Product:
    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}*{self.b}"

    @property
    def answer(self) -> str:
        return str(self.a * self.b)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation that supervised fine-tuning shows."""
        function = {"name": "multiply", "arguments": {"a": self.a, "b": self.b}}
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": self.answer},
            {"role": "assistant", "content": self.answer},
        ]


@dataclass(frozen=True)
class Products:
    """Disjoint sets of products."""

    train: list[Product]
    validation: list[Product]
    heldout: list[Product]


def split_products(source: random.Random) -> Products:
    numbers = range(SMALLEST, LARGEST + 1)
    every = [Product(a, b) for a in numbers for b in numbers]
    source.shuffle(every)
    reserved = NUM_VALIDATION + NUM_HELDOUT
    return Products(every[reserved:], every[:NUM_VALIDATION], every[NUM_VALIDATION:reserved])


def write_products(path: Path, products: Sequence[Product]) -> None:
    """As rows of an environment."""
    write_lines(path, [{"question": product.question, "answer": product.answer} for product in products])


def write_conversations(path: Path, products: Sequence[Product]) -> None:
    """For supervised fine-tuning: the turns of the assistant are trained on."""
    write_lines(path, [{"messages": product.messages} for product in products])


def write_tools_tokenizer(directory: Path) -> None:
    """One token a character, one a role, and three for a call."""
    vocabulary = {f"<{name}>": number for name, number in SPECIAL_PIECES.items()}
    vocabulary |= {character: len(SPECIAL_PIECES) + i for i, character in enumerate(f" {CHARACTERS}")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(f"<|{role}|>", special=True) for role in ROLES])
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)
