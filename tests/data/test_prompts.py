"""Prompt files in, packed batches out; every way in which a file can be wrong; the order of prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import PromptBatch
from hybridflow.config.data import DataConfig
from hybridflow.data import usable
from hybridflow.data.first_rows import renders
from hybridflow.data.order import PromptOrder
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.data.sources import open_files
from hybridflow.data.templates import TemplateOptions
from hybridflow.errors import DataError
from tests.launch import ROOT
from tests.messages import like

WORDS = ["<unk>", "<bos>", "<eos>", "user", "assistant", "what", "is", "one", "plus", "two", "why"]
BOS, EOS = WORDS.index("<bos>"), WORDS.index("<eos>")
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    " {{ message.role }} {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)


def word_tokenizer(*, template: str = "$A") -> PreTrainedTokenizerFast:
    """One token a word. `template` is what special tokens it puts around a text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Replace("\u200b", "")  # a text of zero-width spaces has no tokens
    special = [(word, WORDS.index(word)) for word in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split())


@pytest.fixture
def prompt_file(tmp_path: Path) -> Any:
    """Writes lines, each a text or an object, and gives the path."""

    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    return write


def load(path: Path, **changes: Any) -> PromptDataset:
    options = {
        "tokenizer": word_tokenizer(),
        "prompt_key": "prompt",
        "chat_template": False,
        "max_length": 10,
        "overlong": "error",
        "vocab_size": len(WORDS),
    }
    return load_prompts(path, **(options | changes))


def everything(dataset: PromptDataset) -> PromptBatch:
    return dataset.batch(list(range(len(dataset))))


def token_ids(dataset: PromptDataset) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in everything(dataset).token_lists()]


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


# ------------------------------------------------------------------------------------------------ what is read


def test_prompts_and_columns_are_read(prompt_file) -> None:
    path = prompt_file(
        {"prompt": "what is one", "answer": 1, "tags": ["a"]}, {"tags": [], "answer": 2, "prompt": "why"}
    )
    dataset = load(path)
    assert len(dataset) == 2
    assert token_ids(dataset) == [ids("what is one"), ids("why")]
    assert everything(dataset).texts == ("what is one", "why")
    assert everything(dataset).columns == {"answer": (1, 2), "tags": (["a"], [])}
    assert dataset.dropped.num_rows == 0


def test_the_prompt_key_is_the_configs(prompt_file) -> None:
    dataset = load(prompt_file({"question": "why", "prompt": 3}), prompt_key="question")
    assert everything(dataset).texts == ("why",)
    assert everything(dataset).columns == {"prompt": (3,)}


def test_blank_lines_are_skipped_and_counted_in_line_numbers(prompt_file) -> None:
    dataset = load(prompt_file("", {"prompt": "why"}, "  \t", {"prompt": "what"}))
    assert everything(dataset).texts == ("why", "what")
    with pytest.raises(DataError, match="line 4: is not JSON"):
        load(prompt_file("", {"prompt": "why"}, "", "{"))


def test_a_byte_order_mark_and_unicode_line_separators_are_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "why\u2028why"}\n'.encode("utf-8-sig"))
    assert everything(load(path)).texts == ("why\u2028why",)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_end_as_they_do_elsewhere(tmp_path: Path, end: str) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "why", "answer": 1}', "", '{"prompt": "what is", "answer": "\u00fc"}']
    path.write_bytes(end.join(lines).encode("utf-8-sig"))
    assert everything(load(path)).texts == ("why", "what is")
    assert everything(load(path)).columns == {"answer": (1, "\u00fc")}
    path.write_bytes(end.join([*lines, '{"prompt": 3}']).encode())
    with pytest.raises(DataError, match="line 4: prompt = 3 is a int"):
        load(path)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("$A", ids("what is")),
        ("<bos> $A", (BOS, *ids("what is"))),
        ("<bos> $A <eos>", (BOS, *ids("what is"))),
        ("$A <eos>", ids("what is")),
    ],
)
def test_special_tokens_are_added_but_no_end_token(prompt_file, template: str, expected: tuple) -> None:
    dataset = load(prompt_file({"prompt": "what is"}), tokenizer=word_tokenizer(template=template))
    assert token_ids(dataset) == [expected]


def test_conversations_are_rendered_and_get_no_second_special_tokens(prompt_file) -> None:
    path = prompt_file({"prompt": [message("what is one"), message("two", "assistant"), message("why")]})
    dataset = load(path, chat_template=True, tokenizer=word_tokenizer(template="<bos> $A <eos>"))
    rendered = "<bos> user what is one assistant two user why assistant"
    assert everything(dataset).texts == (rendered,)
    assert token_ids(dataset) == [ids(rendered)]


def test_overlong_prompts_are_dropped_with_their_columns(prompt_file) -> None:
    path = prompt_file(
        {"prompt": "what is", "answer": 0},
        {"prompt": "what is one", "answer": 1},
        {"prompt": "why", "answer": 2},
    )
    dataset = load(path, max_length=2, overlong="drop")
    assert everything(dataset).texts == ("what is", "why")
    assert token_ids(dataset) == [ids("what is"), ids("why")]
    assert everything(dataset).columns == {"answer": (0, 2)}
    assert dataset.dropped.num_rows == 1


def test_special_tokens_count_towards_the_length_and_a_stripped_end_token_does_not(prompt_file) -> None:
    path = prompt_file({"prompt": "what is"})
    tokenizer = word_tokenizer(template="<bos> $A <eos>")
    assert token_ids(load(path, tokenizer=tokenizer, max_length=3)) == [(BOS, *ids("what is"))]
    with pytest.raises(DataError, match=r"has 3 tokens, more than data\.max_prompt_length = 2"):
        load(path, tokenizer=tokenizer, max_length=2)


def test_batch_packs_the_chosen_prompts_in_order(prompt_file) -> None:
    dataset = load(
        prompt_file({"prompt": "what is", "answer": 0}, {"prompt": "why", "answer": 1}, {"prompt": "two", "answer": 2})
    )
    batch = dataset.batch([2, 0, 2])
    assert batch.token_lists() == [list(ids("two")), list(ids("what is")), list(ids("two"))]
    assert batch.lengths.tolist() == [1, 2, 1]
    assert batch.input_ids.dtype == batch.lengths.dtype == torch.int64
    assert batch.texts == ("two", "what is", "two")
    assert batch.columns == {"answer": (2, 0, 2)}
    assert len(batch) == 3


def test_an_empty_batch_has_the_columns(prompt_file) -> None:
    batch = load(prompt_file({"prompt": "why", "answer": 1})).batch([])
    assert (batch.input_ids.tolist(), batch.lengths.tolist(), batch.texts, batch.columns) == (
        [],
        [],
        (),
        {"answer": ()},
    )


# ------------------------------------------------------------------------------------------------ what is held


def test_chunks_do_not_show(prompt_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in what is loaded, nor in the numbers of lines, nor in the comparison of columns."""
    rows = [{"prompt": " ".join(WORDS[5 : 6 + i % 5]), "answer": i} for i in range(20)]
    whole = everything(load(prompt_file(*rows)))
    for name, value in (("CHUNK_ROWS", 3), ("CHUNK_BYTES", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(usable, name, value)
            parts = everything(load(prompt_file(*rows)))
            assert (parts.token_lists(), parts.texts, parts.columns) == (
                whole.token_lists(),
                whole.texts,
                whole.columns,
            )
            with pytest.raises(DataError, match=r"line 21: has no key 'answer', which .*, line 1 has"):
                load(prompt_file(*rows, {"prompt": "why"}))
            with pytest.raises(DataError, match="line 21: the prompt has 11 tokens"):
                load(prompt_file(*rows, {"prompt": "why " * 11, "answer": 1}))
            dataset = load(prompt_file(*rows, {"prompt": "why " * 11, "answer": 1}), max_length=4, overlong="drop")
            assert (len(dataset), dataset.dropped.num_rows) == (16, 5)


MEASURE = """
import resource, sys
from tests.data.test_prompts import Verbose, load

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

few, many = sys.argv[1:]
changes = {"tokenizer": Verbose(), "max_length": 500, "vocab_size": 100_000}
small = load(few, **changes)
before = peak()
dataset = load(many, **changes)
print(peak() - before)
"""


class Verbose:
    """Makes 500 tokens of every text, fast. Their ids are past those that Python holds once."""

    eos_token_id = 0

    def __call__(self, texts: list[str], **options: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(range(i := 1000 + len(text), i + 500)) for text in texts]}


@pytest.mark.thorough
def test_a_million_prompts_of_500_tokens_take_less_than_200_mb(tmp_path: Path) -> None:
    """By what a process takes at most, beyond what one chunk takes for the time being."""
    few, many = 2 * usable.CHUNK_ROWS, 30_000
    for count in (few, many):
        line = json.dumps({"prompt": "why", "solution": "because " * 50})
        (tmp_path / str(count)).write_text(f"{line}\n" * count)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / str(few), tmp_path / str(many)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert int(done.stdout) / many * 1_000_000 < 2e8


@pytest.mark.parametrize("change", ["longer", "as long", "shorter"])
def test_a_file_that_has_changed_is_refused(prompt_file, change: str) -> None:
    path = prompt_file({"prompt": "why", "answer": 1}, {"prompt": "what", "answer": 2})
    dataset = load(path)
    text = path.read_text()
    path.write_text({"longer": text + text, "as long": text.replace("2", "3"), "shorter": text[:20]}[change])
    with pytest.raises(DataError) as raised:
        dataset.batch([1])
    assert str(raised.value).startswith(f"{path}: has changed since the run began to read the file. ")


def test_a_file_that_is_gone_is_an_error(prompt_file) -> None:
    path = prompt_file({"prompt": "why"})
    dataset = load(path)
    path.unlink()
    with pytest.raises(DataError, match=r"prompts.jsonl: cannot be read: no such local file"):
        dataset.batch([0])


def test_a_file_that_changes_while_it_is_read_is_refused(prompt_file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prompt_file(*[{"prompt": "why"}] * 4)
    monkeypatch.setattr(usable, "CHUNK_ROWS", 2)
    tokenizer = word_tokenizer()

    def growing(texts: list[str], **options: bool) -> Any:
        with path.open("a") as file:
            file.write('{"prompt": "what"}\n')
        return word_tokenizer()(texts, **options)

    growing.eos_token_id = tokenizer.eos_token_id
    with pytest.raises(DataError, match="has changed since the run began"):
        load(path, tokenizer=growing)


def test_a_pipe_cannot_be_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # else opening waits for one
    try:
        with pytest.raises(DataError, match="is no regular file, but rows are read again"):
            load(path)
    finally:
        os.close(writer)


def test_the_digest_is_that_of_the_bytes(prompt_file) -> None:
    rows = [{"prompt": "why"}, {"prompt": "what"}]
    first, again = (load(prompt_file(*rows)).digest for _ in range(2))
    other = load(prompt_file(*rows[::-1])).digest
    assert first == again != other
    assert len(first) == 16


# ------------------------------------------------------------------------------------------------ what is refused


def with_added_tokens() -> PreTrainedTokenizerFast:
    """A tokenizer of two tokens more than the model knows."""
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["<think>", "<answer>"])
    return tokenizer


def test_a_token_that_the_model_does_not_know_is_refused(prompt_file) -> None:
    tokenizer = with_added_tokens()
    path = prompt_file({"prompt": "why"}, "", {"prompt": "what is <answer>"})
    with pytest.raises(DataError) as raised:
        load(path, tokenizer=tokenizer)
    assert str(raised.value) == (
        like(
            f"{path}, line 3: the prompt has the token id 12 ('<answer>'), the actor's model knows those below its "
            "vocab_size = 11"
        )
    )
    assert token_ids(load(path, tokenizer=tokenizer, vocab_size=13))[1] == (*ids("what is"), 12)
    with pytest.raises(DataError, match=r"line 3: .*12.*vocab_size = 12"):
        load(path, tokenizer=tokenizer, vocab_size=12)


def test_a_prompt_that_is_left_out_may_have_any_token(prompt_file) -> None:
    path = prompt_file({"prompt": "why"}, {"prompt": "what is <answer>"})
    assert len(load(path, tokenizer=with_added_tokens(), max_length=2, overlong="drop")) == 1


GOOD = {"prompt": "why"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([GOOD, '{"prompt": '], ["line 2", "is not JSON", "column"]),
        ([GOOD, GOOD, "[1]"], ["line 3", "is a JSON list", "expected an object"]),
        (["3"], ["line 1", "is a JSON int"]),
        ([GOOD, {"question": "why"}], ["line 2", "no key 'prompt'", "data.prompt_key", "question"]),
        ([{}], ["line 1", "no key 'prompt'", "its keys are none"]),
        ([GOOD, {"prompt": ""}], ["line 2", "prompt = ''", "is empty"]),
        ([GOOD, {"prompt": " \n\t"}], ["line 2", r"prompt = ' \n\t'", "is empty"]),
        ([{"prompt": 7}], ["line 1", "prompt = 7", "is a int", "expected a text"]),
        ([{"prompt": None}], ["line 1", "prompt = None", "expected a text"]),
        ([{"prompt": [message("why")]}], ["line 1", "is a list", "data.chat_template: true"]),
        ([GOOD, '{"prompt": "\\ud83d"}'], ["line 2", "prompt", r"'\ud83d'", "no character"]),
        ([GOOD, {"prompt": "\u200b"}], ["line 2", "no tokens", r"'\u200b'"]),
        ([GOOD, {"prompt": "why", "answer": 1}], ["line 1", "no key 'answer'", "line 2 has"]),
        ([{"prompt": "why", "answer": 1}, GOOD], ["line 2", "no key 'answer'", "line 1 has"]),
        (
            [GOOD, {"prompt": "what is one plus two"}],
            ["line 2", "5 tokens", "data.max_prompt_length = 4", "data.overlong_prompts"],
        ),
        ([], ["holds no row (data.train)"]),
        (["", " "], ["holds no row (data.train)"]),
    ],
)
def test_bad_lines_are_errors_that_name_file_and_line(prompt_file, lines: list, expected: list[str]) -> None:
    path = prompt_file(*lines)
    with pytest.raises(DataError) as raised:
        load(path, max_length=4)
    for part in [str(path), *expected]:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (3, ["prompt = 3", "is a int", "data.chat_template", "list of messages"]),
        ("<bos> why", ["prompt = '<bos> why' holds '<bos>'", "take data.chat_template=false"]),
        (' [{"role": "user"}]', ["is a text, the JSON of a list: write the list itself in the file"]),
        ("  ", ["prompt = '  ' is empty"]),
        ([], ["prompt = []", "is empty"]),
        (["why"], ["prompt[0] = 'why'", "expected role and content"]),
        ([message("what"), {"role": "user"}], ["prompt[1].content = None", "not a text"]),
        ([{"role": 3, "content": "why"}], ["prompt[0].role = 3", "not a text"]),
        ([message(" ")], ["is empty", "no message has content"]),
        ([message("why", "tool")], ["chat template cannot render", "no tools here"]),
    ],
)
def test_bad_conversations_are_errors(prompt_file, prompt: Any, expected: list[str]) -> None:
    path = prompt_file({"prompt": [message("why")]}, {"prompt": prompt})
    with pytest.raises(DataError) as raised:
        load(path, chat_template=True)
    for part in [f"{path}, line 2", *expected]:
        assert part in str(raised.value)


def test_a_text_is_the_users_message_for_a_chat_template(prompt_file) -> None:
    both = prompt_file({"prompt": "why [is] one"}, {"prompt": [message("why [is] one")]})
    one, other = load(both, chat_template=True).batch([0, 1]).token_lists()
    assert one == other and load(both, chat_template=True).batch([0]).conversations == ([message("why [is] one")],)


def test_a_text_among_messages_is_an_error_where_nobody_has_asked_for_it(prompt_file) -> None:
    path = prompt_file({"prompt": [message("why")]}, {"prompt": "why"})
    with pytest.raises(DataError, match="line 2: prompt = 'why' is a text, but the first row has messages"):
        load(path, chat_template=True, template=TemplateOptions(texts=False))
    kept = load(path, chat_template=True, template=TemplateOptions(texts=False), bad_rows="drop")
    assert len(kept) == 1 and kept.dropped.counts == {"wrong type": 1}


@pytest.mark.parametrize(
    ("given", "rows", "expected"),
    [
        ({}, [{"prompt": "why"}, {"prompt": [message("why")]}], False),
        ({}, [{"prompt": [message("why")]}, {"prompt": "why"}], True),
        ({}, [{"prompt": [1, 2]}, {"prompt": [message("why")]}], True),  # ids say nothing
        ({}, [{"prompt": []}, {"prompt": "why"}], False),
        ({"columns": {"prompt": "asked"}, "bad_rows": "drop"}, [{"x": 1}, {"asked": [message("why")]}], True),
        ({}, [{"other": 1}], False),  # what is wrong is told where rows are read
        ({"prompt_key": "question"}, [{"prompt": "why", "question": [message("why")]}], True),
        ({"columns": {"prompt": "asked.text"}}, [{"asked": {"text": [message("why")]}}], True),
        ({"chat_template": True}, [{"prompt": "why"}], True),
        ({"chat_template": False}, [{"prompt": [message("why")]}], False),
        ({"environment": "a:B"}, [{"prompt": "why"}], True),
    ],
)
def test_the_first_prompt_says_whether_the_chat_template_renders(
    prompt_file, given: dict[str, Any], rows: list[dict[str, Any]], expected: bool
) -> None:
    path = prompt_file(*rows)
    data = DataConfig(train=str(path), prompts_per_iteration=1, max_prompt_length=9, **given)
    assert renders(data, open_files(data.train, "data.train")) is expected


def test_a_tokenizer_without_a_chat_template_is_an_error(prompt_file) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="line 1: prompt: the tokenizer has no chat template: messages need one"):
        load(prompt_file({"prompt": [message("why")]}), tokenizer=tokenizer, chat_template=True)


def test_dropping_every_prompt_is_an_error(prompt_file) -> None:
    path = prompt_file({"prompt": "what is one"}, {"prompt": "what is one plus"})
    with pytest.raises(DataError) as raised:
        load(path, max_length=2, overlong="drop")
    for part in [str(path), "no prompt is left", "all 2", "data.max_prompt_length = 2", "shortest has 3"]:
        assert part in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "absent.jsonl"
    with pytest.raises(DataError) as raised:
        load(path)
    assert f"{path}: cannot be read: no such local file" in str(raised.value)
    binary = tmp_path / "prompts.jsonl"
    binary.write_bytes(b"{\xff\xfe")
    with pytest.raises(DataError, match=r"prompts.jsonl, line 1: is not UTF-8 text .*JSON lines"):
        load(binary)


# ------------------------------------------------------------------------------------------------ order


def test_without_shuffling_the_order_is_the_files() -> None:
    order = PromptOrder(3, seed=5, shuffle=False)
    assert order.next(2) == [0, 1]
    assert order.next(5) == [2, 0, 1, 2, 0]
    assert order.next(0) == []
    assert order.position == 7


def test_every_epoch_is_another_permutation() -> None:
    order = PromptOrder(20, seed=0, shuffle=True)
    epochs = [order.next(20) for _ in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_is_a_function_of_the_seed() -> None:
    def draw(seed: int) -> list[int]:
        return PromptOrder(50, seed, True).next(100)

    assert draw(3) == draw(3)
    assert len({tuple(draw(seed)) for seed in range(6)}) == 6
    # epoch 1 of one seed is not epoch 0 of the next
    assert draw(0)[50:] != draw(1)[:50]


def test_the_order_does_not_change_between_releases() -> None:
    """A checkpoint's position means the same prompts later on."""
    assert PromptOrder(6, 0, True).next(12) == [0, 5, 4, 2, 1, 3, 3, 0, 2, 4, 1, 5]


def test_the_order_does_not_depend_on_how_many_are_taken_at_a_time() -> None:
    whole = PromptOrder(7, 1, True).next(40)
    order = PromptOrder(7, 1, True)
    parts = [order.next(count) for count in (1, 2, 3, 4, 30)]
    assert [index for part in parts for index in part] == whole


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 3, 7, 8, 20])
def test_a_resumed_order_goes_on_exactly(position: int, shuffle: bool) -> None:
    order = PromptOrder(7, 1, shuffle)
    order.next(position)
    resumed = PromptOrder(7, 1, shuffle, position=position)
    assert resumed.position == order.position == position
    assert resumed.next(15) == order.next(15)
    assert resumed.position == position + 15
