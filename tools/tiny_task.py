"""The task of the tiny quickstart: two-digit addition, its prompts, right and wrong responses, its tokenizer.

A prompt is "47+85=", the right response is "132" and then the end token. The answer can be checked, a CPU
learns it in seconds, and a half-trained model makes a graded variety of mistakes (carries, single digits,
length), which is the head-room that reinforcement learning then uses.

Everything here is strings and `random.Random`; what needs a network lives in `make_tiny.py`.
"""

import io
import json
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from transformers import LlamaTokenizer

LOW, HIGH = 10, 99  # operands, inclusive
CHARACTERS = string.digits + "+-*/=()<>.,:;?!'\"%@#$&_" + string.ascii_lowercase
SPECIAL_PIECES = {
    "unk": 0,
    "bos": 1,
    "eos": 2,
    "pad": 3,
}  # pad differs from eos: a padded row keeps its end token
MAX_RAMBLE = 8  # characters of the longest made-up response


@dataclass(frozen=True)
class Problem:
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


@dataclass(frozen=True)
class Response:
    """What a policy wrote; `ended` is False where the length limit cut it off before an end token."""

    text: str
    ended: bool = True

    def __str__(self) -> str:
        return f"{self.text}</s>" if self.ended else self.text


@dataclass(frozen=True)
class Split:
    """Disjoint sets of problems; a+b and b+a are never in two of them."""

    train: list[Problem]
    validation: list[Problem]
    heldout: list[Problem]


def is_right(response: str, answer: str) -> bool:
    return response.strip() == answer


def split_problems(source: random.Random, *, num_validation: int, num_heldout: int) -> Split:
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(a, HIGH + 1)]
    source.shuffle(pairs)
    num_reserved = num_validation + num_heldout
    assert num_reserved < len(pairs) // 2, f"{num_reserved} of {len(pairs)} reserved: too few to train on"
    reserved = [Problem(*source.choice([(a, b), (b, a)])) for a, b in pairs[:num_reserved]]
    train = [Problem(a, b) for pair in pairs[num_reserved:] for a, b in sorted({pair, pair[::-1]})]
    source.shuffle(train)
    return Split(train, reserved[:num_validation], reserved[num_validation:])


def write_prompts(path: Path, problems: list[Problem]) -> None:
    write_lines(path, [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems])


def write_pairs(path: Path, problems: list[Problem], wrong: list[Response]) -> None:
    """Both responses with "</s>" where they ended, which the tokenizer reads as the end token."""
    rows = [
        {"prompt": problem.prompt, "chosen": str(Response(problem.answer)), "rejected": str(response)}
        for problem, response in zip(problems, wrong, strict=True)
    ]
    write_lines(path, rows)


def write_fixed_data(directory: Path, split: Split, source: random.Random) -> None:
    """What the quickstarts on fixed data train on: sft.jsonl, preferences.jsonl and labelled.jsonl, and held-out ones.

    A row of the last two has a wrong completion that is another text than the right one: the end token, which these
    files leave to the trainer, tells no two of them apart. Of labelled completions every other one is wrong.
    """
    for suffix, problems in (("", split.train), ("_heldout", split.heldout)):
        right = [{"prompt": problem.prompt, "completion": problem.answer} for problem in problems]
        wrong = [_wrong_text(source, problem.answer) for problem in problems]
        pairs = [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": text}
            for row, text in zip(right, wrong, strict=True)
        ]
        labelled: list[dict[str, str | bool]] = [
            {"prompt": row["prompt"], "completion": row["completion"] if i % 2 else text, "label": i % 2 == 1}
            for i, (row, text) in enumerate(zip(right, wrong, strict=True))
        ]
        write_lines(directory / f"sft{suffix}.jsonl", right)
        write_lines(directory / f"preferences{suffix}.jsonl", pairs)
        write_lines(directory / f"labelled{suffix}.jsonl", labelled)


def _wrong_text(source: random.Random, answer: str) -> str:
    while True:
        text = wrong_response(source, answer).text
        if text and not is_right(text, answer):
            return text


def write_lines(path: Path, rows: Sequence[Mapping[str, str | bool]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


# Wrong responses. Each maker covers one way to fail, or to please a reward model without being right.


def _one_digit_off(source: random.Random, answer: str) -> Response:
    place = source.randrange(len(answer))
    digit = source.choice([d for d in string.digits if d != answer[place]])
    return Response(answer[:place] + digit + answer[place + 1 :])


def _two_digits_off(source: random.Random, answer: str) -> Response:
    first, second = source.sample(range(len(answer)), 2)
    digits = list(answer)
    for place in (first, second):
        digits[place] = source.choice([d for d in string.digits if d != answer[place]])
    return Response("".join(digits))


def _carry_error(source: random.Random, answer: str) -> Response:
    return Response(str(abs(int(answer) + source.choice([-100, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 100]))))


def _swapped_digits(source: random.Random, answer: str) -> Response:
    return Response(answer[::-1])


def _digit_lost(source: random.Random, answer: str) -> Response:
    place = source.randrange(len(answer))
    return Response(answer[:place] + answer[place + 1 :])


def _digit_added(source: random.Random, answer: str) -> Response:
    place = source.randrange(len(answer) + 1)
    return Response(answer[:place] + source.choice(string.digits) + answer[place:])


def _leading_zeros(source: random.Random, answer: str) -> Response:
    return Response("0" * source.randint(1, 2) + answer)


def _random_number(source: random.Random, answer: str) -> Response:
    return Response("".join(source.choices(string.digits, k=source.randint(1, 4))))


def _empty(source: random.Random, answer: str) -> Response:
    return Response("", ended=source.random() < 0.8)


def _text_after(source: random.Random, answer: str) -> Response:
    tail = source.choice(["=", "+", f"={answer}", f"+{answer}", answer, f" {answer}"] + list(CHARACTERS))
    return Response((answer + tail * source.randint(1, 3))[:MAX_RAMBLE], ended=source.random() < 0.5)


def _text_before(source: random.Random, answer: str) -> Response:
    return Response(source.choice(CHARACTERS.replace("0", "")) + answer)


def _never_ended(source: random.Random, answer: str) -> Response:
    """Right so far, or more digits than fit: what stands at the limit of the response length."""
    tail = "".join(source.choices(string.digits, k=source.choice([0, 0, 1, 2, 3, 5])))
    return Response(answer + tail, ended=False)


def _repetition(source: random.Random, answer: str) -> Response:
    unit = source.choice([answer, answer[0], answer[-1], source.choice(CHARACTERS)])
    return Response((unit * MAX_RAMBLE)[: source.randint(1, MAX_RAMBLE)], ended=source.random() < 0.5)


def _rambling(source: random.Random, answer: str) -> Response:
    text = "".join(source.choices(CHARACTERS, k=source.randint(1, MAX_RAMBLE)))
    return Response(text, ended=source.random() < 0.5)


MISTAKES: dict[str, Callable[[random.Random, str], Response]] = {
    "one_digit_off": _one_digit_off,
    "two_digits_off": _two_digits_off,
    "carry_error": _carry_error,
    "swapped_digits": _swapped_digits,
    "digit_lost": _digit_lost,
    "digit_added": _digit_added,
    "leading_zeros": _leading_zeros,
    "random_number": _random_number,
    "empty": _empty,
    "text_after": _text_after,
    "text_before": _text_before,
    "never_ended": _never_ended,
    "repetition": _repetition,
    "rambling": _rambling,
}
# Wrong numbers are hard to tell from right ones, wrong forms are easy: the former are shown more often.
MISTAKE_WEIGHTS = [6, 2, 6, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1]


def is_wrong(response: Response, answer: str) -> bool:
    """A right number without its end token counts as wrong: a policy must not be paid for never stopping."""
    return not (response.ended and is_right(response.text, answer))


def wrong_response(source: random.Random, answer: str) -> Response:
    """A made-up wrong response, never the right one (a maker that hits it by chance is asked again)."""
    while True:
        (make,) = source.choices(list(MISTAKES.values()), MISTAKE_WEIGHTS)
        response = make(source, answer)
        if is_wrong(response, answer):
            return response


# The tokenizer.


def _corpus(source: random.Random) -> Iterator[str]:
    """Sums, and now and then a line of every character, so that people may type other prompts."""
    for index in range(2000):
        problem = Problem(source.randint(LOW, HIGH), source.randint(LOW, HIGH))
        yield problem.prompt + problem.answer
        if index % 40 == 0:
            yield " ".join(CHARACTERS)


def write_tokenizer(directory: Path, source: random.Random) -> None:
    """Train sentencepiece (tokenizer.model) and write its fast twin (tokenizer.json, tokenizer_config.json).

    One piece a character: the vocabulary has room for the characters and the special pieces and for no merge.
    The tokenizer adds no bos: with and without special tokens, "12+34=" is the same six ids.
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
    """Written by hand: what `save_pretrained` adds depends on its version, and older ones cannot read it."""
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
