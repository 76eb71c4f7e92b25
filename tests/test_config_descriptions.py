"""Every key of a config has a description that a person can read: a docstring right below the field."""

import re

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.keys import Key, keys_of

LONGEST = 25  # words of a sentence; CONTRIBUTING asks for 20
REACHED = ("reward.models.0.weight", "algorithm.policy.importance.cap", "data.train.0.weight")
KEYS = {key.path: key for tree in (ExperimentConfig, FixedDataConfig) for key in keys_of(tree)}


def problems(key: Key) -> list[str]:
    """What is wrong with a description."""
    if not key.description:
        return [f"{key.path}: has no description: a docstring right below the field"]
    sentences = re.split(r"(?<=[.?!])\s+", key.description)
    long = [sentence for sentence in sentences if len(sentence.split()) > LONGEST]
    found = [f"{key.path}: a sentence has more than {LONGEST} words: {sentence}" for sentence in long]
    return found if key.description.endswith(".") else [*found, f"{key.path}: does not end in a period"]


@pytest.mark.parametrize("tree", [ExperimentConfig, FixedDataConfig])
def test_every_key_has_a_description(tree: type[ExperimentConfig] | type[FixedDataConfig]) -> None:
    found = [problem for key in keys_of(tree) for problem in problems(key)]
    assert found == []


@pytest.mark.parametrize("description", ["", "No period", f"{'word ' * 30}end."])
def test_a_poor_description_is_found(description: str) -> None:
    assert len(problems(Key("a.b", "integer", "0", description, "grpo"))) == 1


def test_keys_reach_into_lists_and_algorithms() -> None:
    for path in (
        "reward.models.0.weight",
        "algorithm.policy.importance.cap",
        "data.train.0.weight",
        "actor.optimizer.lr",
    ):
        assert path in KEYS, path
    assert KEYS["reward.models.0.weight"].default == "1.0"
    assert KEYS["actor.optimizer.lr"].default == "required"
