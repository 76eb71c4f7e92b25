"""What `python -m hybridflow.data` says of a file, with and without a config."""

import json
from pathlib import Path

import pytest
import torch

from hybridflow.cli.data import main
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.fixed_inputs import load_rows
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.data.understood import example_summary
from hybridflow.data.view import histogram, marked
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.messages import like
from tests.tiny_models import make_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[list[str], str]:
    assert main([str(argument) for argument in arguments]) == status
    out, error = capsys.readouterr()
    return out.splitlines(), error


def test_columns(tmp_path, capsys) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+2=", "tags": ["a", 2], "info": {"id": 1}},
        {"prompt": None, "tags": [], "level": 1.5},
        "[1]",
    )
    assert told(capsys, path)[0] == [
        f"{path}: 3 rows, 0.00 MB",
        like(
            f"1 of the first 3 rows cannot be read, first: {path}, line 3: is a JSON list, expected an object of named "
            "fields"
        ),
        "  prompt  text, null: '1+2='",
        "  tags    list of text or int, empty list: ['a', 2]",
        "  info    (id): {'id': 1}  (1 of 2 rows lack it)",
        "  level   float: 1.5  (1 of 2 rows lack it)",
    ]


def test_what_a_run_would_see(inputs, tmp_path, capsys) -> None:
    rows = [{"prompt": f"{10**i}+{i}=", "answer": str(i)} for i in range(4)]
    path = write(tmp_path / "a.jsonl", *rows, {"prompt": "1" * 13, "answer": ""})
    config = write_config(tmp_path / "config.yaml", inputs)
    lines, _ = told(capsys, path, config, "data.overlong_prompts=drop")
    own = lines[lines.index("") + 1 :]
    assert own[:3] == [
        "end tokens: '</s>' (2) by generation_config.json, config.json, the tokenizer",
        "first prompt, 4 tokens: '1+0='",
        "column answer: '0', '1', '2'",
    ]
    start = next(i for i, line in enumerate(own) if "left out" in line)
    assert any(line.startswith("tokenizers: ") for line in own[3:start])
    assert own[start:] == [
        like("data.train: left out 1 of 5 prompts longer than data.max_prompt_length"),
        "tokens of a sequence, and how many have so many",
        "  4-4  1  ########################################",
        "  5-5  1  ########################################",
        "  6-6  1  ########################################",
        "  7-7  1  ########################################",
        "  mean 5.5, shortest 4, longest 7",
        "---- row 1 of the run",
        "4 tokens: 1+0=",
        "  answer: '0'",
        "---- row 2 of the run",
        "5 tokens: 10+1=",
        "  answer: '1'",
        "---- row 3 of the run",
        "6 tokens: 100+2=",
        "  answer: '2'",
    ]
    shuffled, _ = told(capsys, path, config, "data.overlong_prompts=drop", "data.shuffle=true", "seed=3")
    assert shuffled[-8:] != lines[-8:]
    lines, error = told(capsys, path, config, status=1)
    assert f"{path}: 5 rows, 0.00 MB" in lines
    assert error.startswith(f"hybridflow.data: error: {path}, line 5: the prompt has 13 tokens, more than ")


def test_what_a_run_on_fixed_data_would_train_on(inputs, tmp_path, capsys) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "1+2=", "answer": "3"}, {"question": "1+9=", "answer": "10"})
    config = {
        "name": "sft",
        "num_epochs": 1,
        "data": {
            "train": "elsewhere.jsonl",
            "columns": {"prompt": "question", "completion": "answer"},
            "batch_size": 1,
            "max_length": 20,
            "shuffle": False,
        },
        "actor": {"model": str(inputs / "policy"), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        "algorithm": {"name": "sft"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    lines, _ = told(capsys, path, tmp_path / "config.yaml")
    own = lines[lines.index("") + 1 :]
    assert own[:3] == [
        "columns prompt (question), completion (answer) have texts as they are",
        "first row, 6 tokens, 2 of them trained, in [[ ]]: '1+2=[[3</s>]]'",
        "end token that is taught: '</s>' (2)",
    ]
    assert lines[-4:] == [
        "---- row 1 of the run",
        "sequence, 6 tokens of which 2 count: 1+2=[[3</s>]]",
        "---- row 2 of the run",
        "sequence, 7 tokens of which 3 count: 1+9=[[10</s>]]",
    ]


def test_marks_stand_around_each_run_of_tokens() -> None:
    tokenizer = make_tokenizer()
    ids = torch.tensor(tokenizer("1+2=3")["input_ids"])
    for trained, text in (
        ([1, 0, 0, 1, 1], "[[1]]+2[[=3]]"),
        ([0, 0, 0, 0, 1], "1+2=[[3]]"),
        ([1, 1, 1, 1, 1], "[[1+2=3]]"),
    ):
        assert marked(ids, torch.tensor(trained, dtype=torch.bool), tokenizer) == text


def test_bins_are_round() -> None:
    assert list(histogram([95, 130, 130, 310])) == [
        "   80-99   1  ####################",
        "  100-119  0",
        "  120-139  2  ########################################",
        *(f"  {start}-{start + 19}  0" for start in range(140, 300, 20)),
        "  300-319  1  ####################",
        "  mean 166.2, shortest 95, longest 310",
    ]


def test_what_cannot_be_read_is_an_error(tmp_path, capsys) -> None:
    lines, error = told(capsys, tmp_path / "absent.jsonl", status=1)
    assert (lines, error) == (
        [],
        f"hybridflow.data: error: {tmp_path}/absent.jsonl: cannot be read: no such local file\n",
    )


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (
            ("1+2=3", "1+9=10"),
            ["chosen begins with the prompt itself, and the model reads the prompt twice"],
        ),
        (("1+2=3", "10"), []),  # in one row by chance
    ],
)
def test_pairs_that_repeat_their_prompt_are_told(inputs, tmp_path, chosen, told) -> None:
    rows = [
        {"prompt": prompt, "chosen": one, "rejected": "4"} for prompt, one in zip(("1+2=", "1+9="), chosen, strict=True)
    ]
    write(tmp_path / "a.jsonl", *rows)
    model = {"model": str(inputs / "policy"), "dtype": "float32"}
    config = FixedDataConfig.model_validate(
        {
            "name": "dpo",
            "num_epochs": 1,
            "data": {"train": str(tmp_path / "a.jsonl"), "batch_size": 2, "max_length": 20},
            "actor": {**model, "optimizer": {"lr": 1e-3}},
            "reference": model,
            "algorithm": {"name": "dpo"},
        }
    )
    tokenizer = load_tokenizer(inputs / "policy")
    lines = example_summary(config, load_rows(config.data.train, tokenizer, config, 1000), tokenizer)
    found = [line.removesuffix(". Leave the prompt out of one of the two columns") for line in lines if "twice" in line]
    assert found == told
