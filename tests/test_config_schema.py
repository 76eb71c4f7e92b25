"""hybridflow/config/schema.json is what the sections say, takes what the loader takes and refuses what it refuses."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.config.auto import autos
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.json_schema import config_schema, schema_text
from hybridflow.config.keys import keys_of
from hybridflow.config.kinds import config_class, load_config
from hybridflow.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "hybridflow" / "config" / "schema.json"
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
SCHEMA = Draft202012Validator(config_schema())


def problems(tree: Any) -> list[str]:
    return [error.message for error in SCHEMA.iter_errors(json.loads(json.dumps(tree)))]


def quickstart(**changes: Any) -> dict[str, Any]:
    """The tree of a quickstart with dotted keys set; `__` stands for a point."""
    tree = copy.deepcopy(read_tree(ROOT / "configs" / "quickstart_grpo.yaml"))
    for key, value in changes.items():
        *sections, last = key.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def test_the_committed_schema_is_that_of_the_sections() -> None:
    assert COMMITTED.read_text() == schema_text(), (
        "python -m hybridflow.cli.config schema > hybridflow/config/schema.json"
    )


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(config_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_names_the_schema_and_validates(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == COMMITTED, first
    assert problems(yaml.safe_load(path.read_text())) == []
    assert problems(yaml.safe_load(load_config(path).to_yaml())) == [], "resolved"


# a change to a quickstart, and whether it may be: the loader and the schema agree
ACCEPTED = {
    "none": {},
    "null sections": {"critic": None, "metrics__wandb": None},
    "auto": {"actor__tensor_parallel_size": "auto", "actor__recompute": "auto", "rollout__kv_cache_gib": "auto"},
    "auto of a reference": {"reference__micro_batch_tokens": "auto"},
    "ranks as text": {"actor__ranks": "0-1", "reference__ranks": "0-1"},
    "one rank": {"rollout__ranks": 0},
    "tasks": {
        "data__train": {"reasoning_gym": [{"name": "chain_sum", "size": 9, "seed": 1}]},
        "data__heldout": {"reasoning_gym": [{"name": "chain_sum", "size": 9, "seed": 99}]},
    },
    "files": {"data__train": ["a.jsonl", {"path": "b.jsonl"}]},
    "an evaluation with arguments": {"metrics__eval_reward": {"function": "a:b", "arguments": {"x": [1]}}},
    "environment variables": {"env_vars": {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": 1}},
    "a former name": {"environment": {"NCCL_DEBUG": "INFO"}},
    "a former key of the policy": {"algorithm__policy": {"importance_cap": 3.0}},
    "token biases": {"sampling__logit_bias": {"5": 1.0}},
}
REFUSED = {
    "unknown key": {"sampling__temprature": 1.0},
    "unknown section": {"trainer": {"epochs": 1}},
    "unknown key of an algorithm": {"algorithm__gamma": 0.9},
    "unknown key in a list": {"reward__functions": [{"function": "a:b", "wieght": 1}]},
    "unknown algorithm": {"algorithm": {"name": "grop"}},
    "wrong type": {"data__max_prompt_length": "long"},
    "a list for a number": {"seed": [1]},
    "out of range": {"sampling__top_p": 1.5},
    "zero": {"num_iterations": 0},
    "auto where a number has to be": {"num_iterations": "auto"},
    "auto of a trained role in a reference": {"reference__recompute": "auto"},
    "a missing key": {"actor__optimizer": {"min_lr": 0.0}},
    "a null that is none": {"sampling": None},
    "no ranks": {"actor__ranks": "first"},
    "a variable of another kind": {"env_vars": {"PATH": "x"}},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_it_takes_what_the_loader_takes(changes: dict[str, Any]) -> None:
    tree = quickstart(**changes)
    assert problems(tree) == []
    if not autos(tree):
        config_class(tree).from_tree(tree, "x.yaml")


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_it_refuses_what_the_loader_refuses(changes: dict[str, Any]) -> None:
    tree = quickstart(**changes)
    assert problems(tree) != []
    with pytest.raises(ConfigError):
        config_class(tree).from_tree(tree, "x.yaml")


def test_configs_on_fixed_data_have_their_own_keys() -> None:
    tree = read_tree(ROOT / "configs" / "quickstart_sft.yaml")
    assert problems(tree | {"rollout": None, "critic": None}) == []
    assert problems(tree | {"rollout": {}}) != []
    assert problems(tree | {"sampling": {"max_response_length": 8}}) != []
    assert problems({key: value for key, value in tree.items() if key != "data"}) != []


def test_an_algorithm_without_a_name_is_ppo_with_its_former_keys() -> None:
    tree = quickstart(algorithm={"clip_range": 0.1, "ppo_epochs": 2, "gamma": 0.9})
    assert problems(tree) == []
    assert problems(tree | {"algorithm": {"name": "ppo", "ppo_epochs": 2}}) != []
    assert problems(tree | {"algorithm": {"std": "batch"}}) != []


def test_on_a_base_keys_may_be_missing_but_not_wrong() -> None:
    assert problems({"base": "other.yaml"}) == []
    assert problems({"base": "other.yaml", "algorithm": {"beta": 0.2}, "actor": {"optimizer": {"eps": 0.1}}}) == []
    assert problems({"base": "other.yaml", "actor": {"optimizer": {"esp": 0.1}}}) != []
    assert problems({"base": ["a.yaml", "b.yaml"]}) != []
    assert problems({"name": "x"}) != []


def test_every_key_has_its_description_there() -> None:
    text = schema_text()
    for tree in (ExperimentConfig, FixedDataConfig):
        lacking = [key.path for key in keys_of(tree) if json.dumps(key.description, ensure_ascii=False) not in text]
        assert lacking == []
