"""Every input of a config that a host can lack or have damaged becomes a line that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.inspection.inputs import THERE, input_findings
from tests.distributed.tiny_experiment import make_inputs, write_config


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("originals") / "inputs")


@pytest.fixture
def here(originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals, tmp_path / "inputs")
    return tmp_path / "inputs"


def config_of(here: Path, **changes: Any) -> ExperimentConfig:
    path = write_config(here.parent / "config.yaml", here)
    tree = json.loads(path.read_text())
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    path.write_text(json.dumps(tree))
    return ExperimentConfig.from_yaml(path)


def test_all_is_there(here: Path) -> None:
    evaluation = {"eval_interval": 1, "eval_reward": "hybridflow.rewards:exact_match"}
    config = config_of(here, data={"heldout": str(here / "heldout.jsonl")}, metrics=evaluation)
    findings, digests = input_findings(config, "a")
    assert [finding.status for finding in findings] == ["ok"] * len(findings)
    assert [finding.name for finding in findings] == [
        "model of actor",
        "model of critic",
        "model of reference",
        "model of reward.models.0",
        "tokenizer",
        "tokenizers",
        "data.train",
        "data.heldout",
        "functions hybridflow.rewards:exact_match",
    ]
    assert findings[6].value == f"{here}/train.jsonl: the first 16 rows are readable"
    assert {"the config", f"config.json of {here}/policy", f"the tokenizer of {here}/policy", "data.train"} <= set(
        digests
    )
    assert input_findings(config, "b")[1] == digests


def test_another_file_has_another_digest(here: Path) -> None:
    config = config_of(here)
    _, before = input_findings(config, "a")
    with (here / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "answer": "2"}\n')
    _, after = input_findings(config, "a")
    assert [name for name in before if before[name] != after[name]] == ["data.train"]


def remove(name: str) -> Callable[[Path], object]:
    return lambda here: shutil.rmtree(here / name) if (here / name).is_dir() else (here / name).unlink()


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda here: (here / name).write_text(text)


def shorten(name: str) -> Callable[[Path], object]:
    return lambda here: (here / name).write_bytes((here / name).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (remove("reference"), "model of reference", "{here}/reference/config.json: no such file"),
        (remove("policy/model.safetensors"), "model of actor", "{here}/policy"),
        (shorten("policy/model.safetensors"), "model of actor", "{here}/policy/model.safetensors"),
        (write("reward/config.json", "{"), "model of reward.models.0", "{here}/reward/config.json: is not JSON"),
        (remove("policy/tokenizer.json"), "tokenizer", "{here}/policy: has no tokenizer"),
        (remove("policy"), "tokenizer", "{here}/policy: no such directory"),
        (remove("train.jsonl"), "data.train", "{here}/train.jsonl: cannot be read: no such local file"),
        (write("train.jsonl", ""), "data.train", "{here}/train.jsonl: holds no row"),
        (write("train.jsonl", "1+1="), "data.train", "{here}/train.jsonl, line 1"),
        (write("train.jsonl", '{"question": "1"}'), "data.train", "{here}/train.jsonl, line 1: has no key 'prompt'"),
    ],
)
def test_what_is_missing_or_damaged(damage: Callable, name: str, message: str, here: Path) -> None:
    config = config_of(here)
    damage(here)
    found = {finding.name: finding for finding in input_findings(config, "a")[0] if finding.status == "fail"}
    assert name in found
    assert found[name].value.startswith(message.format(here=here))
    assert found[name].advice == THERE and found[name].host == "a"


def test_weights_that_are_not_of_this_config_json(here: Path) -> None:
    config = config_of(here)
    file = here / "critic" / "config.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps(tree | {"num_hidden_layers": tree["num_hidden_layers"] + 1}))
    [found] = [finding for finding in input_findings(config, "a")[0] if finding.status == "fail"]
    assert found.name == "model of critic" and "that config.json asks for" in found.value


def test_functions_that_cannot_be_imported(here: Path) -> None:
    config = config_of(here, reward={"functions": [{"function": "absent_rewards:digits"}]})
    [found] = [finding for finding in input_findings(config, "a")[0] if finding.status == "fail"]
    assert found.name == "functions absent_rewards:digits"
    assert "cannot import absent_rewards" in found.value
    assert "beside the config or into PYTHONPATH" in found.advice


# ------------------------------------------------------------------------------------------------ fixed data


def dpo_config(here: Path, rows: list[dict[str, str]]) -> FixedDataConfig:
    (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"model": str(here / "policy"), "dtype": "float32"}
    tree = {
        "name": "run",
        "num_epochs": 1,
        "data": {"train": str(here / "pairs.jsonl"), "batch_size": 2, "max_length": 16},
        "actor": {**model, "optimizer": {"lr": 1e-3}},
        "reference": model,
        "algorithm": {"name": "dpo"},
    }
    return FixedDataConfig.model_validate(tree)


def test_rows_of_fixed_data_are_read_as_the_run_will(here: Path) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": str(i)} for i in range(3)]
    findings, digests = input_findings(dpo_config(here, rows), "a")
    assert [(finding.name, finding.status) for finding in findings] == [
        ("model of actor, reference", "ok"),
        ("tokenizer", "ok"),
        ("tokenizers", "ok"),
        ("data.train", "ok"),
    ]
    assert findings[-1].value == f"{here}/pairs.jsonl: the first 3 rows are readable"
    assert "data.train" in digests
    del rows[1]["rejected"]
    findings, _ = input_findings(dpo_config(here, rows), "a")
    assert findings[-1].status == "fail" and "rejected" in findings[-1].value
