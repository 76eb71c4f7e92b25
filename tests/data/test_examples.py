"""Examples for training on fixed data: their tokens, which of them count, and what is wrong with a row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.data.examples import Example, ExampleDataset, load_examples
from hybridflow.errors import DataError
from tests.data.test_prompts import BOS, EOS, WORDS, ids, word_tokenizer


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def load(path: Path, kind: str, **changes: Any) -> ExampleDataset:
    options = {"tokenizer": word_tokenizer(), "max_length": 10, "vocab_size": len(WORDS)}
    return load_examples(path, kind=kind, **(options | changes))


def parts(example: Example) -> list[tuple[list[int], list[int]]]:
    """What comes before the tokens that count, and these."""
    for sequence, trained, length in zip(example.sequences, example.trained, example.prompt_lengths, strict=True):
        assert (sequence.dtype, trained.dtype) == (torch.int64, torch.bool)
        assert trained.tolist() == [i >= length for i in range(len(sequence))]
    return [
        (sequence[~trained].tolist(), sequence[trained].tolist())
        for sequence, trained in zip(example.sequences, example.trained, strict=True)
    ]


SFT = {"prompt": "what is", "completion": "one two"}


def test_a_completion_is_trained_with_an_end_token(tmp_path: Path) -> None:
    [example] = load(write(tmp_path / "a.jsonl", SFT), "sft").examples([0])
    assert parts(example) == [([*ids("what is")], [*ids("one two"), EOS])]
    assert (example.prompt_lengths, example.label, example.margin) == ((2,), True, 0.0)


@pytest.mark.parametrize("template", ["<bos> $A", "<bos> $A <eos>"])
def test_special_tokens_stand_where_a_run_has_them(tmp_path: Path, template: str) -> None:
    dataset = load(write(tmp_path / "a.jsonl", SFT), "sft", tokenizer=word_tokenizer(template=template))
    assert parts(dataset.examples([0])[0]) == [([BOS, *ids("what is")], [*ids("one two"), EOS])]


def test_an_end_token_that_is_there_is_not_doubled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "what is ", "completion": "one <eos>"})
    assert parts(load(path, "sft").examples([0])[0])[0][1] == [*ids("one"), EOS]


def test_a_token_over_the_boundary_is_not_made(tmp_path: Path) -> None:
    """`what is o` + `ne` would be `what is one`: the prompt keeps the tokens that a run would generate from."""
    path = write(tmp_path / "a.jsonl", {"prompt": "what is plus", "completion": "two"})
    [example] = load(path, "sft").examples([0])  # joint: `what is plustwo`, one unknown word in place of two
    assert parts(example) == [([*ids("what is plus")], [*ids("two"), EOS])]


def test_pairs_and_their_margins(tmp_path: Path) -> None:
    pair = {"prompt": "what is ", "chosen": "one", "rejected": "two two"}
    dataset = load(write(tmp_path / "a.jsonl", pair, pair | {"margin": 2}), "pairs")
    first, other = dataset.examples([0, 1])
    assert parts(first) == [(list(ids("what is")), [*ids("one"), EOS]), (list(ids("what is")), [*ids("two two"), EOS])]
    assert (first.prompt_lengths, first.margin, other.margin) == ((2, 2), 0.0, 2.0)


def test_labels(tmp_path: Path) -> None:
    row = {"prompt": "what ", "completion": "one"}
    labels = [True, False, 1, 0]
    dataset = load(write(tmp_path / "a.jsonl", *[row | {"label": label} for label in labels]), "labelled")
    assert [example.label for example in dataset.examples([3, 2, 1, 0])] == [False, True, False, True]
    assert parts(dataset.examples([0])[0]) == [(list(ids("what")), [*ids("one"), EOS])]


PAIR = {"prompt": "what ", "chosen": "one", "rejected": "two"}


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("sft", {"prompt": "what"}, "has no field 'completion'; its fields are prompt"),
        ("sft", {"prompt": 3, "completion": "one"}, "prompt = 3 is a int, expected a text"),
        ("sft", {"prompt": "what", "completion": ""}, "completion = '' is empty"),
        ("sft", '{"prompt": "what", "completion": "\\ud83d"}', r"completion holds '\ud83d', which is no character"),
        ("sft", {"prompt": "\u200b", "completion": "one"}, "the tokenizer makes no tokens of the prompt"),
        ("sft", {"prompt": "what ", "completion": "\u200b"}, "the tokenizer makes no tokens of the completion"),
        ("pairs", {"prompt": "what", "chosen": "one"}, "has no field 'rejected'; its fields are prompt, chosen"),
        ("pairs", PAIR | {"margin": "1"}, "margin = '1', expected a finite number"),
        ("pairs", PAIR | {"margin": True}, "margin = True, expected a finite number"),
        ("pairs", json.dumps(PAIR)[:-1] + ', "margin": NaN}', "margin = nan, expected a finite number"),
        ("pairs", PAIR | {"rejected": "two " * 9}, "the example has 11 tokens, more than data.max_length = 10; "),
        ("labelled", SFT, "has no field 'label'"),
        ("labelled", SFT | {"label": "yes"}, "label = 'yes', expected true or false"),
        ("labelled", SFT | {"label": None}, "label = None, expected true or false"),
        ("sft", "[1]", "is a JSON list, expected an object"),
        ("sft", "{", "is not JSON"),
    ],
)
def test_bad_rows_are_errors_or_left_out(tmp_path: Path, kind: str, row: Any, expected: str) -> None:
    good = {"prompt": "what ", "completion": "one", "chosen": "one", "rejected": "two", "label": True}
    path = write(tmp_path / "a.jsonl", good, row, good)
    with pytest.raises(DataError) as raised:
        load(path, kind)
    assert str(raised.value).startswith(f"{path}, line 2: {expected}")
    dataset = load(path, kind, bad_rows="drop", overlong="drop")
    assert (len(dataset), dataset.num_dropped) == (2, 1)
    assert len(dataset.examples([0, 1])) == 2


def test_a_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SFT)
    with pytest.raises(DataError) as raised:
        load(path, "sft", vocab_size=9)
    assert str(raised.value) == (
        f"{path}, line 1: the example has the token id 9 ('two'), the model knows those below its vocab_size = 9"
    )


def test_a_file_without_rows_and_one_without_any_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no row"):
        load(write(tmp_path / "a.jsonl", ""), "sft")
    with pytest.raises(
        DataError, match=r"no row is left: .*line 1: the example has 5 tokens, more than data.max_length = 2"
    ):
        load(write(tmp_path / "a.jsonl", SFT), "sft", max_length=2, overlong="drop")
