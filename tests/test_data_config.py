"""The section `data`: files in every form, columns under other names, and what is refused."""

from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.data import SourceConfig
from hybridflow.errors import ConfigError
from tests.test_config import MINIMAL


def load(**data: Any) -> ExperimentConfig:
    return ExperimentConfig.from_tree({**MINIMAL, "data": {**MINIMAL["data"], **data}}, "c.yaml")


def problem(**data: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(**data)
    return str(raised.value)


def test_a_file_and_several() -> None:
    assert load(train="a.jsonl").data.train == "a.jsonl"
    several = load(train=["a.jsonl", {"path": "b"}]).data.train
    assert several == (SourceConfig(path="a.jsonl"), SourceConfig(path="b"))
    weights = load(train=[{"path": "a", "weight": 2}, {"path": "b", "weight": 0.5}]).data.train
    assert weights == (SourceConfig(path="a", weight=2.0), SourceConfig(path="b", weight=0.5))
    config = load(train=[{"path": "a", "weight": 2}], columns={"answer": "reward_model.ground_truth"})
    assert ExperimentConfig.from_tree(config.model_dump(mode="json"), "again") == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": 3}, "data.train: 3 is neither a path nor a list of files, such as [{path: a.jsonl, weight: 2}]"),
        ({"train": []}, "data.train: [] names no file"),
        ({"train": [3]}, "data.train: 0 = 3: is neither a path nor a section with path and weight"),
        ({"train": [{"path": "a"}, {"file": "b"}]}, "data.train: 1.file: unknown key; known are path, weight"),
        ({"train": [{"weight": 2}]}, "data.train: 0.path = None: a path is required"),
        ({"train": [{"path": "a", "weight": 0}]}, "data.train: 0.weight = 0: a weight is a number above 0"),
        ({"train": [{"path": "a", "weight": True}]}, "data.train: 0.weight = True: a weight is a number above 0"),
        (
            {"train": [{"path": "a", "weight": 1}, "b"]},
            "data.train: 1.weight: is missing, but other files have a weight. Give all files a weight, or none",
        ),
        (
            {"heldout": [{"path": "a", "weight": 1}]},
            "data: heldout: weights say how often a row is trained on, held-out rows are all used once",
        ),
        ({"columns": {"prompt": ""}}, "data: columns: 'prompt': '' names no column, such as prompt: question"),
        ({"columns": {"prompt": "a..b"}}, "data: columns: 'prompt': 'a..b' names no column, such as prompt: question"),
        (
            {"columns": {"prompt": "q"}, "prompt_key": "question"},
            "data: prompt_key = question and columns.prompt = q both name the prompt's column: leave one out",
        ),
        ({"bad_rows": "skip"}, "data.bad_rows = 'skip': input should be 'drop' or 'error'"),
        ({"checked_mib": -1}, "data.checked_mib = -1: input should be greater than or equal to 0"),
    ],
)
def test_what_is_refused(data: dict, message: str) -> None:
    assert problem(**data) == f"c.yaml: {message}"
