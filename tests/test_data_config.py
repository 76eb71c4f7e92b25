"""The section `data`: files in every form, columns under other names, and what is refused."""

from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.data import HubSourceConfig, SourceConfig
from hybridflow.config.reasoning_gym import SCORER
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
            "data: prompt_key = question cannot go with columns.prompt = q: both name the prompt's column. "
            "Leave one out. Set data.prompt_key=prompt",
        ),
        ({"bad_rows": "skip"}, "data.bad_rows = 'skip': input should be 'drop' or 'error'"),
        ({"checked_mib": -1}, "data.checked_mib = -1: input should be greater than or equal to 0"),
    ],
)
def test_what_is_refused(data: dict, message: str) -> None:
    assert problem(**data) == f"c.yaml: {message}"


def test_held_out_sets_by_name() -> None:
    """A mapping whose values are mappings is sets; one without is a source, and the only set."""
    sets = {
        "math": {"files": "m.jsonl", "samples": 4, "temperature": 1},
        "code": {"files": {"hub": "a/b", "split": "x"}},
    }
    config = load(train="t.jsonl", heldout=sets)
    found = config.data
    assert found.files_by_key == {
        "data.train": "t.jsonl",
        "data.heldout.math.files": "m.jsonl",
        "data.heldout.code.files": (HubSourceConfig(hub="a/b", split="x"),),
    }
    math, code = found.heldout_sets.values()
    assert (math.samples, math.temperature, math.interval) == (4, 1.0, None)
    assert (code.samples, code.temperature) == (1, 0.0), "greedy, unless the set says another"
    assert ExperimentConfig.from_tree(config.model_dump(mode="json"), "again") == config
    alone = load(heldout={"hub": "a/b", "split": "x"}).data
    assert alone.heldout_sets == {"": code} and list(alone.files_by_key) == ["data.train", "data.heldout"]
    assert load().data.heldout_sets == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"a": {"files": "m"}, "b": "x.jsonl"},
            "b = 'x.jsonl': sets by name are sections, such as b: {files: b.jsonl}",
        ),
        ({"a.b": {"files": "m"}}, "'a.b': the name of a set has letters, digits, _ and - alone"),
        ({"a": {}}, "a.files: is required"),
        ({"a": {"files": "m", "sample": 2}}, "a.sample: unknown key; known are files, samples, temperature, interval"),
        ({"a": {"files": "m", "samples": 0}}, "a.samples = 0: input should be greater than 0"),
        (
            {"a": {"files": "m", "samples": 4}},
            "a.samples = 4 cannot go with temperature = 0.0: all responses to a prompt are the same. "
            "Give a temperature, such as 1.0. Set data.heldout.a.samples=1",
        ),
        (
            {"a": {"files": "m", "temperature": 0.001}},
            "a.temperature = 0.001: is 0 or at least 0.01. Set data.heldout.a.temperature=0 or 0.01",
        ),
        (
            {"a": {"files": [{"path": "m", "weight": 2}]}},
            "a.files: weights say how often a row is trained on, held-out rows are all used once",
        ),
        ({"a": {"files": 5}}, "a.files: 5 is neither a path nor a list of files, such as [{path: a.jsonl, weight: 2}]"),
    ],
)
def test_held_out_sets_that_are_refused(given: dict, message: str) -> None:
    assert problem(heldout=given) == f"c.yaml: data.heldout: {message}"


def test_tasks_of_a_set_are_no_rows_to_train_on() -> None:
    def tasks(seed: int) -> dict:
        return {"reasoning_gym": [{"name": "chain_sum", "size": 10, "seed": seed}]}

    reward = {"reward": None, "algorithm": {"name": "grpo", "kl": {"use": "none"}}, "critic": None, "reference": None}
    tree = {**MINIMAL, **reward, "sampling": {"samples_per_prompt": 2, "max_response_length": 8}}

    def with_sets(files: object) -> ExperimentConfig:
        data = {**MINIMAL["data"], "train": tasks(0), "heldout": {"sums": {"files": files}}}
        return ExperimentConfig.from_tree({**tree, "data": data, "metrics": {"eval_interval": 1}}, "c.yaml")

    config = with_sets(tasks(10))
    assert config.data.heldout_sets["sums"].samples == 1
    assert config.metrics.eval_reward is not None and config.metrics.eval_reward.function == SCORER
    with pytest.raises(ConfigError, match=r"heldout.sums.files.reasoning_gym.0.seed = 5: .* so 5 rows"):
        with_sets(tasks(5))
    with pytest.raises(ConfigError, match=r"heldout.sums.files: reasoning_gym is in one of train and"):
        with_sets("rows.jsonl")
