"""GSM8K as published into prompts with answers."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data.prompts import load_prompts
from tests.data.test_prompts import WORDS, word_tokenizer
from tools.data.gsm8k import INSTRUCTION, main

ROWS = [
    {"question": "what is one plus one? ", "answer": "one plus one = <<1+1=2>>2\n#### 2"},
    {"question": "why?", "answer": "#### 1,234,567"},
    {"question": "two", "answer": "minus ##\n#### -3.5 "},
]


def publish(directory: Path, kind: str) -> Path:
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        if kind == "parquet":
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, directory / f"{split}-00000-of-00001.parquet", row_group_size=2)
        else:
            (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_questions_become_messages_and_solutions_numbers(tmp_path, capsys, kind) -> None:
    (tmp_path / "in").mkdir()
    out = tmp_path / "out"
    assert main([str(publish(tmp_path / "in", kind)), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}/train.jsonl: 3 rows\n{out}/test.jsonl: 1 rows\n"
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["2", "1234567", "-3.5"]
    assert rows[0]["prompt"] == [{"role": "user", "content": f"what is one plus one? {INSTRUCTION}"}]
    loaded = load_prompts(
        out / "test.jsonl",
        word_tokenizer(),
        prompt_key="prompt",
        chat_template=True,
        max_length=100,
        overlong="error",
        vocab_size=len(WORDS),
    )
    assert loaded.batch([0]).columns == {"answer": ("2",)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "why?", "answer": "2"}, "answer has no number after ####"),
        ({"question": "why?", "answer": "2 ####"}, "answer has no number after ####"),
        ({"query": "why?", "answer": "#### 2"}, "has no text 'question'; its columns are query, answer"),
    ],
)
def test_what_is_no_row_of_it_is_refused(tmp_path, capsys, row, message) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: {path}, line 2: {message}\n"


def test_a_directory_without_the_files_is_refused(tmp_path, capsys) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: has neither train*.parquet nor train.jsonl\n"
