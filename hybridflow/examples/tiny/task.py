"""The task of the tiny quickstart, four digits backwards: prompts, right and wrong answers, tokenizer.

A prompt is "4729=", the right answer is "9274" and then the end token. The answer can be checked, a CPU learns it in
seconds, and a half-trained model makes a graded variety of mistakes (single digits, order, length), which is the
head-room that reinforcement learning then uses. Whether a digit is right depends on one digit of the prompt alone:
that is what a score at the last token can teach a small reward model in minutes.

Everything here is strings and `random.Random`; what needs a network lives in `models.py`.

With tools a question is "47*29": the model asks for `multiply` with 47 and 29, reads 1363, and says 1363. No tiny model
knows products. A half-trained one writes the form of a call and copies half of the digits wrong.
"""

import io
import itertools
import json
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

LENGTH = 4  # digits
CHARACTERS = string.digits + "+-*/=()<>.,:;?!'\"%@#$&_" + string.ascii_lowercase
SPECIAL_PIECES = {
    "unk": 0,
    "bos": 1,
    "eos": 2,
    "pad": 3,
}  # pad differs from eos: a padded row keeps the end token
MAX_RAMBLE = 8  # characters of the longest made-up answer


@dataclass(frozen=True)
class Problem:
    digits: str

    @property
    def prompt(self) -> str:
        return f"{self.digits}="

    @property
    def answer(self) -> str:
        return self.digits[::-1]


@dataclass(frozen=True)
class TaskSplit:
    """Disjoint sets of problems; digits and their mirror are never in two of them."""

    train: list[Problem]
    validation: list[Problem]
    heldout: list[Problem]


def is_right(text: str, answer: str) -> bool:
    return text.strip() == answer


def split_problems(source: random.Random, *, num_validation: int, num_heldout: int) -> TaskSplit:
    every = map("".join, itertools.product(string.digits, repeat=LENGTH))
    mirrored = sorted({min(digits, digits[::-1]) for digits in every})
    source.shuffle(mirrored)
    num_reserved = num_validation + num_heldout
    assert num_reserved < len(mirrored) // 2, f"{num_reserved} of {len(mirrored)} reserved: too few to train on"
    reserved = [Problem(source.choice([digits, digits[::-1]])) for digits in mirrored[:num_reserved]]
    train = [Problem(one) for digits in mirrored[num_reserved:] for one in sorted({digits, digits[::-1]})]
    source.shuffle(train)
    return TaskSplit(train, reserved[:num_validation], reserved[num_validation:])


def write_prompts(path: Path, problems: Sequence[Problem]) -> None:
    write_lines(path, [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems])


def write_answers(path: Path, problems: Sequence[Problem]) -> None:
    write_lines(path, [{"prompt": problem.prompt, "completion": problem.answer} for problem in problems])


def write_judged(directory: Path, name: str, problems: Sequence[Problem], wrong: Sequence[str]) -> None:
    """preferencesNAME.jsonl, and labelledNAME.jsonl, where every other completion is wrong. wrong: one a problem."""
    both = list(zip(problems, wrong, strict=True))
    pairs = [{"prompt": problem.prompt, "chosen": problem.answer, "rejected": text} for problem, text in both]
    labelled: list[dict[str, str | bool]] = [
        {"prompt": problem.prompt, "completion": problem.answer if i % 2 else text, "label": i % 2 == 1}
        for i, (problem, text) in enumerate(both)
    ]
    write_lines(directory / f"preferences{name}.jsonl", pairs)
    write_lines(directory / f"labelled{name}.jsonl", labelled)


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


# Wrong answers. Each maker covers one way to fail, or to please a reward model without being right.


def _one_digit_off(source: random.Random, answer: str) -> str:
    place = source.randrange(len(answer))
    digit = source.choice([d for d in string.digits if d != answer[place]])
    return answer[:place] + digit + answer[place + 1 :]


def _two_digits_off(source: random.Random, answer: str) -> str:
    return _one_digit_off(source, _one_digit_off(source, answer))


def _neighbours_swapped(source: random.Random, answer: str) -> str:
    place = source.randrange(len(answer) - 1)
    return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]


def _not_reversed(source: random.Random, answer: str) -> str:
    return answer[::-1]


def _digit_lost(source: random.Random, answer: str) -> str:
    place = source.randrange(len(answer))
    return answer[:place] + answer[place + 1 :]


def _digit_added(source: random.Random, answer: str) -> str:
    place = source.randrange(len(answer) + 1)
    return answer[:place] + source.choice(string.digits) + answer[place:]


def _random_digits(source: random.Random, answer: str) -> str:
    return "".join(source.choices(string.digits, k=source.randint(1, 6)))


def _text_after(source: random.Random, answer: str) -> str:
    tail = source.choice(["=", f"={answer}", answer, f" {answer}"] + list(CHARACTERS))
    return (answer + tail * source.randint(1, 3))[:MAX_RAMBLE]


def _text_before(source: random.Random, answer: str) -> str:
    return source.choice(CHARACTERS) + answer


def _repetition(source: random.Random, answer: str) -> str:
    unit = source.choice([answer, answer[0], answer[-1], source.choice(CHARACTERS)])
    return (unit * MAX_RAMBLE)[: source.randint(1, MAX_RAMBLE)]


def _rambling(source: random.Random, answer: str) -> str:
    return "".join(source.choices(CHARACTERS, k=source.randint(1, MAX_RAMBLE)))


MISTAKES: dict[str, Callable[[random.Random, str], str]] = {
    "one_digit_off": _one_digit_off,
    "two_digits_off": _two_digits_off,
    "neighbours_swapped": _neighbours_swapped,
    "not_reversed": _not_reversed,
    "digit_lost": _digit_lost,
    "digit_added": _digit_added,
    "random_digits": _random_digits,
    "text_after": _text_after,
    "text_before": _text_before,
    "repetition": _repetition,
    "rambling": _rambling,
}
# Wrong digits are hard to tell from right ones, wrong forms are easy: the former are shown more often.
MISTAKE_WEIGHTS = [8, 2, 2, 1, 1, 1, 2, 1, 1, 1, 1]


def wrong_answer(source: random.Random, answer: str) -> str:
    """A made-up wrong one, never the right one (a maker that hits it by chance is asked again)."""
    while True:
        (make,) = source.choices(list(MISTAKES.values()), MISTAKE_WEIGHTS)
        text = make(source, answer)
        if not is_right(text, answer):
            return text


def draw_wrong(source: random.Random, problem: Problem, written: Mapping[Problem, Sequence[str]]) -> str:
    """Of `written`, what a policy wrote that is wrong, and made-up ones, in equal shares."""
    if written.get(problem) and source.random() < 0.5:
        return source.choice(written[problem])
    return wrong_answer(source, problem.answer)


# The tokenizer.


def _corpus(source: random.Random) -> Iterator[str]:
    """Digits, and now and then a line of every character, so that people may type other prompts."""
    for index in range(2000):
        problem = Problem("".join(source.choices(string.digits, k=LENGTH)))
        yield problem.prompt + problem.answer
        if index % 40 == 0:
            yield " ".join(CHARACTERS)


def write_tokenizer(directory: Path, source: random.Random) -> None:
    """Train sentencepiece (tokenizer.model) and write the fast twin (tokenizer.json, tokenizer_config.json).

    One piece a character: the vocabulary has room for the characters and the special pieces and for no merge.
    The tokenizer adds no bos: with and without special tokens, "4729=" is the same five ids.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_corpus(source),
        model_writer=model,
        model_type="bpe",
        vocab_size=len(SPECIAL_PIECES) + len(CHARACTERS) + 1,  # + 1: the space
        character_coverage=1.0,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_piece="<pad>",
        num_threads=1,
        minloglevel=2,
        unk_id=SPECIAL_PIECES["unk"],
        bos_id=SPECIAL_PIECES["bos"],
        eos_id=SPECIAL_PIECES["eos"],
        pad_id=SPECIAL_PIECES["pad"],
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = LlamaTokenizer.from_pretrained(directory, add_prefix_space=False, pad_token="<pad>")
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    config = json.dumps(_tokenizer_config(), indent=2)
    (directory / "tokenizer_config.json").write_text(f"{config}\n", encoding="utf-8")


def _tokenizer_config() -> dict[str, object]:
    """Written by hand: `save_pretrained` adds keys that depend on the version, and older versions cannot read them."""
    return {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }


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
