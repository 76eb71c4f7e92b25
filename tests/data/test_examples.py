"""Examples for training on fixed data: their tokens, which of them count, and what is wrong with a row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.data.examples import Example, ExampleDataset, load_examples
from hybridflow.errors import DataError
from tests.data.test_prompts import BOS, EOS, WORDS, ids, word_tokenizer
from tests.messages import like


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
        ("sft", {"prompt": "what"}, "has no field 'completion'; its fields are prompt; data.columns says"),
        (
            "sft",
            {"prompt": 3, "completion": "one"},
            "prompt = 3 is a int, expected a text, a list of messages or token ids",
        ),
        ("sft", {"prompt": "what", "completion": ""}, "completion = '' is empty"),
        ("sft", '{"prompt": "what", "completion": "\\ud83d"}', r"completion holds '\ud83d', which is no character"),
        (
            "sft",
            '{"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "one \\ud83d"}]}',
            r"messages holds '\ud83d', which is no character",
        ),
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
    assert (len(dataset), dataset.dropped.num_rows) == (2, 1)
    assert len(dataset.examples([0, 1])) == 2


def test_a_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SFT)
    with pytest.raises(DataError) as raised:
        load(path, "sft", vocab_size=9)
    assert str(raised.value) == (
        like(f"{path}, line 1: the example has the token id 9 ('two'), the model knows those below its vocab_size = 9")
    )


def test_a_file_without_rows_and_one_without_any_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no row"):
        load(write(tmp_path / "a.jsonl", ""), "sft")
    with pytest.raises(
        DataError, match=r"no row is left: .*line 1: the example has 5 tokens, more than data.max_length = 2"
    ):
        load(write(tmp_path / "a.jsonl", SFT), "sft", max_length=2, overlong="drop")


# ------------------------------------------------------------------------------------------------ other formats

CHAT = (
    "<bos> {% for message in messages %}{{ message.role }} {{ message.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TALK = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "what"},
    {"role": "assistant", "content": "two two"},
]
BEGINNING = [BOS, *ids("user why"), *ids("assistant")]


def chat_tokenizer() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def load_chat(path: Path, kind: str, **changes: Any) -> ExampleDataset:
    return load(path, kind, tokenizer=chat_tokenizer(), max_length=40, **changes)


def test_of_messages_what_the_assistant_says_counts(tmp_path: Path) -> None:
    [example] = load_chat(write(tmp_path / "a.jsonl", {"messages": TALK}), "sft").examples([0])
    (sequence,), (trained,) = example.sequences, example.trained
    middle = [EOS, *ids("user what"), EOS, *ids("assistant")]
    whole = [BOS, *ids("user why"), EOS, *ids("assistant one"), *middle, *ids("two two"), EOS]
    assert sequence.tolist() == whole
    assert sequence[trained].tolist() == [*ids("one"), EOS, *ids("two two"), EOS]
    assert trained.nonzero().flatten().tolist() == [5, 6, 11, 12, 13]
    assert example.prompt_lengths == (5,)


def test_conversations_with_and_without_a_prompt_are_the_same(tmp_path: Path) -> None:
    """TRL's explicit and implicit prompts; and a prompt that is the text of the first message."""
    rejected = [*TALK[:3], {"role": "assistant", "content": "one"}]
    explicit = {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": rejected[3:]}
    implicit = {"chosen": TALK, "rejected": rejected}
    dataset = load_chat(write(tmp_path / "a.jsonl", explicit, implicit, implicit | {"prompt": "why"}), "pairs")
    first, *others = dataset.examples([0, 1, 2])
    assert [s[t].tolist() for s, t in zip(first.sequences, first.trained, strict=True)] == [
        [*ids("two two"), EOS],
        [*ids("one"), EOS],
    ]
    assert first.prompt_lengths == (11, 11)
    for other in others:
        assert [s.tolist() for s in other.sequences] == [s.tolist() for s in first.sequences]
        assert [t.tolist() for t in other.trained] == [t.tolist() for t in first.trained]


def test_texts_that_begin_alike_have_that_for_a_prompt(tmp_path: Path) -> None:
    row = {"chosen": "what is one two", "rejected": "what is one plus"}
    [example] = load(write(tmp_path / "a.jsonl", row), "pairs").examples([0])
    assert parts(example) == [
        (list(ids("what is one")), [*ids("two"), EOS]),
        (list(ids("what is one")), [*ids("plus"), EOS]),
    ]


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": [1, 5], "completion": [7, 2]}, {"prompt": [1, 5], "completion": [7]}]
    dataset = load(write(tmp_path / "a.jsonl", *rows), "sft")
    assert [parts(example) for example in dataset.examples([0, 1])] == [[([1, 5], [7, EOS])]] * 2


def test_columns_of_other_names_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"data": {"question": "what is", "answer": "one two"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"prompt": "data.question", "completion": "data.answer"}
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", *rows)):
        [example] = load(path, "sft", columns=columns).examples([0])
        assert parts(example) == [(list(ids("what is")), [*ids("one two"), EOS])]
    with pytest.raises(DataError, match=r"row 1: has no field 'data.text' \(data.columns.prompt\); the fields of data"):
        load(tmp_path / "a.parquet", "sft", columns={"prompt": "data.text", "completion": "data.answer"})


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("sft", {"messages": "why"}, "messages = 'why' is a str; "),
        ("sft", {"messages": TALK[:1]}, "messages: has no message of the assistant to be trained on"),
        ("sft", {"messages": [{"role": "user"}]}, "messages[0].content = None is not a text"),
        (
            "sft",
            {"prompt": "why", "completion": TALK[1:2]},
            "prompt is a text and completion is a list of messages, expected the same of both",
        ),
        ("sft", {"prompt": [1, 5], "completion": [7, 11]}, "the example has the token id 11 ("),
        ("sft", {"prompt": [1, -5], "completion": [7]}, "the example has the token id -5 (below 0)"),
        ("sft", {"prompt": [1, 2.5], "completion": [7]}, "prompt[0] = 1 is no message"),
        ("pairs", {"chosen": "one", "rejected": "two"}, "without a prompt, chosen and rejected begin with nothing in"),
        ("pairs", {"chosen": "one", "rejected": "one two"}, "without a prompt, chosen and rejected differ in nothing"),
        ("pairs", {"chosen": TALK, "rejected": "one"}, "chosen is a list of messages and rejected is a text"),
        (
            "pairs",
            {"prompt": "what", "chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]},
            "prompt = 'what' is a text, but chosen is a list of messages without this text",
        ),
        ("labelled", {"messages": TALK, "label": True}, "has no field 'prompt'; its fields are messages, label; "),
    ],
)
def test_bad_rows_of_other_formats(tmp_path: Path, kind: str, row: Any, expected: str) -> None:
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as raised:
        load_chat(path, kind)
    assert str(raised.value).startswith(f"{path}, line 1: {expected}")


def test_a_token_over_the_boundary_of_a_message_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHAT.replace("assistant {% endif", "assis{% endif")
    with pytest.raises(DataError, match="line 1: the token 'assistant' reaches over the boundary of what the assist"):
        load(write(tmp_path / "a.jsonl", {"messages": TALK[:2]}), "sft", tokenizer=tokenizer, max_length=40)
