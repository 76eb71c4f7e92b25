"""Rows of reasoning-gym's tasks: what a config may say, what it need not say, and the files that are made."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.config.data import parse_prompts
from hybridflow.config.reasoning_gym import RELEASE, ReasoningGymConfig, TaskConfig
from hybridflow.data.gym_files import row_of, rows_of_task
from hybridflow.data.sources import open_files
from hybridflow.errors import ConfigError, DataError
from tests.gym import needs_package, release

SUM = {"name": "chain_sum", "size": 4, "seed": 1}
BASE = ["reward=null", "metrics={}", "data.heldout=null"]


def config_of(train: Any, *overrides: str) -> ExperimentConfig:
    given = [f"data.train={json.dumps(train)}", *overrides]
    return ExperimentConfig.from_yaml("configs/quickstart_grpo.yaml", [*BASE, *given])


def tasks(*given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"reasoning_gym": list(given), **more}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (tasks(), "reasoning_gym = []: tuple should have at least 1 item"),
        (tasks({"name": "chain_sum", "size": 4}), "reasoning_gym.0.seed: is required"),
        (tasks({**SUM, "size": 0}), "reasoning_gym.0.size = 0: input should be greater than 0"),
        (tasks({**SUM, "sizes": 4}), "reasoning_gym.0.sizes: unknown key; known are name, weight, size, seed, config"),
        (tasks(SUM, prompt="x"), "prompt: unknown key; known are reasoning_gym, system_prompt"),
        (tasks({**SUM, "config": {"seed": 2}}), "reasoning_gym.0.config.seed = 2: give seed beside config, not in it"),
        (
            tasks({**SUM, "name": "codeio"}),
            "reasoning_gym.0.name = codeio: cannot be used: its rows are not the same",
        ),
        (tasks({**SUM, "name": "composite"}), "reasoning_gym.0.name = composite: cannot be used: name the tasks"),
        (tasks({**SUM, "name": "n_queens"}), "reasoning_gym.0.name = n_queens: its scorer executes the model's answer"),
        (tasks(SUM, {**SUM, "weight": 1.0}), "reasoning_gym.0.weight: is missing, but other tasks have a weight"),
        (tasks(SUM, system_prompt="defualt"), "system_prompt = 'defualt': is neither one of default, DeepSeekZero"),
    ],
)
def test_tasks_that_cannot_be(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_prompts(given)
    with pytest.raises(ConfigError, match=re.escape(f"data.train: {problem}")):
        config_of(given)


@pytest.mark.parametrize(
    ("heldout", "problem"),
    [
        (tasks({**SUM, "seed": 4}), "heldout.reasoning_gym.0.seed = 4: row i is made from seed + i, so 1 rows"),
        (tasks({**SUM, "seed": 0, "size": 2}), "of chain_sum are also in data.train. Give a seed from 5 on"),
        (tasks({**SUM, "seed": 9, "weight": 1.0}), "heldout.reasoning_gym.0.weight = 1: weights say how often"),
        ("data/tiny/heldout.jsonl", "one scorer has to fit both: give both tasks, or both files"),
    ],
)
def test_heldout_rows_are_no_rows_to_train_on(heldout: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config_of(tasks(SUM), f"data.heldout={json.dumps(heldout)}")


def test_heldout_rows_of_another_config_or_behind_the_others_are_fine() -> None:
    for heldout in ({**SUM, "config": {"max_terms": 9}}, {**SUM, "seed": 5}, {**SUM, "name": "leg_counting"}):
        [task] = config_of(tasks(SUM), f"data.heldout={json.dumps(tasks(heldout))}").data.heldout.reasoning_gym
        assert (task.name, task.seed, task.config) == (heldout["name"], heldout["seed"], heldout.get("config", {}))


def test_examples_of_fixed_data_are_no_tasks() -> None:
    from hybridflow.config.fixed_data import FixedDataConfig

    with pytest.raises(ConfigError, match=re.escape("data.train: reasoning_gym: its rows are prompts alone")):
        FixedDataConfig.from_yaml("configs/quickstart_sft.yaml", [f"data.train={json.dumps(tasks(SUM))}"])


def test_the_scorer_need_not_be_named() -> None:
    heldout = json.dumps(tasks({**SUM, "seed": 9}))
    config = config_of(tasks(SUM), f"data.heldout={heldout}", "metrics.eval_interval=5")
    assert config.reward is not None and config.metrics.eval_reward is not None
    assert [function.function for function in config.reward.functions] == ["hybridflow.rewards:reasoning_gym"]
    assert config.reward.functions[0].per == "row"
    assert config.metrics.eval_reward.function == "hybridflow.rewards:reasoning_gym"
    assert ExperimentConfig.from_tree(config.model_dump(mode="json", by_alias=True), "x").reward == config.reward


def test_a_confined_scorer_gets_all_responses_to_a_prompt_at_once() -> None:
    config = config_of(tasks(SUM, {"name": "countdown", "size": 4, "seed": 1, "execute": True}))
    assert config.reward is not None and config.reward.functions[0].per == "group"


def test_other_functions_are_added_and_a_named_scorer_stays_as_it_is() -> None:
    length = {"function": "hybridflow.rewards:length_penalty", "arguments": {"start": 1, "limit": 2}}
    both = config_of(tasks(SUM), f"reward={json.dumps({'functions': [length]})}").reward
    scorer = {"function": "hybridflow.rewards:reasoning_gym", "weight": 0.5, "arguments": {"tagged": False}}
    own = config_of(tasks(SUM), f"reward={json.dumps({'functions': [scorer]})}").reward
    assert both is not None and own is not None
    assert [function.function.partition(":")[2] for function in both.functions] == ["reasoning_gym", "length_penalty"]
    assert [(function.weight, function.arguments) for function in own.functions] == [(0.5, {"tagged": False})]


def test_the_class_of_an_environment_gives_the_reward_itself() -> None:
    config = config_of(tasks(SUM), "data.chat_template=true", "data.environment=a:B")
    assert config.reward is not None and config.reward.functions == ()


@pytest.mark.parametrize(("chat", "key"), [("true", "messages"), ("false", "prompt")])
def test_a_chat_template_gets_messages(chat: str, key: str) -> None:
    assert config_of(tasks(SUM), f"data.chat_template={chat}").data.prompt_key == key
    assert config_of(tasks(SUM), f"data.chat_template={chat}", "data.prompt_key=question").data.prompt_key == "question"


@pytest.mark.skipif(release() is not None, reason="the package is there")
def test_without_the_package_the_error_says_how_to_install_it() -> None:
    files = parse_prompts(tasks(SUM))
    with pytest.raises(DataError, match=re.escape("data.train.reasoning_gym.0.name = chain_sum: the package")) as told:
        open_files(files, "data.train")
    assert "pip install 'hybridflow[gym]'" in str(told.value)


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.1.24")
    with pytest.raises(DataError, match=re.escape(f"reasoning-gym 0.1.24 is installed, but {RELEASE} is needed")):
        open_files(parse_prompts(tasks(SUM)), "data.train")


def test_a_row_has_the_question_as_text_and_as_messages() -> None:
    entry = {"question": "1+1?", "answer": "2", "metadata": {"board": ((1, 2),), 3: None}}
    row = row_of(entry, {"name": "sums", "config": {}, "execute": False}, " Think. ")
    assert row["prompt"] == "Think.\n\n1+1?" and row["question"] == "1+1?" and row["answer"] == "2"
    assert row["messages"] == [{"role": "system", "content": "Think."}, {"role": "user", "content": "1+1?"}]
    assert row["entry"] == "{'question': '1+1?', 'answer': '2', 'metadata': {'board': ((1, 2),), 3: None}}"
    assert row_of(entry, {"name": "sums"}, None)["prompt"] == "1+1?"


def test_an_entry_is_a_literal_of_pythons_own_kinds() -> None:
    entry = {"question": "?", "answer": np.str_("2"), "metadata": {"sizes": (np.int64(3), [np.float32(0.5)])}}
    assert row_of(entry, {"name": "x"}, None)["entry"] == (
        "{'question': '?', 'answer': '2', 'metadata': {'sizes': (3, [0.5])}}"
    )
    with pytest.raises(DataError, match=re.escape("name = x: an entry of the task is no Python literal: {'question'")):
        row_of({**entry, "metadata": {"when": Path("a")}}, {"name": "x"}, None)


# ------------------------------------------------------------------------------------------------ with the package


@needs_package
def test_rows_are_those_of_the_package_whoever_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """word_ladder's rows depend on the seed of hashes."""
    from reasoning_gym.factory import create_dataset

    task = TaskConfig(**{**SUM, "config": {"max_terms": 3}})
    made = []
    for home in ("a", "b"):
        monkeypatch.setattr(Path, "home", lambda home=home: tmp_path / home)
        made.append([rows_of_task(one, None, "k") for one in (task, TaskConfig(name="word_ladder", size=3, seed=2))])
    assert [file.read_bytes() for file in made[0]] == [file.read_bytes() for file in made[1]]
    rows = [json.loads(line) for line in made[0][0].read_text().splitlines()]
    data = create_dataset("chain_sum", size=4, seed=1, max_terms=3)
    assert [(row["question"], row["answer"]) for row in rows] == [(one["question"], one["answer"]) for one in data]
    written = made[0][0].stat().st_mtime_ns
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "a")
    assert rows_of_task(task, None, "k").stat().st_mtime_ns == written  # not made again


@needs_package
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({**SUM, "name": "chain_sums"}, "k.reasoning_gym.0.name = chain_sums: is no task of reasoning-gym 0.1.25; did"),
        ({**SUM, "config": {"min_term": 1}}, "k.reasoning_gym.0.config.min_term: is no key of chain_sum; known are"),
        ({**SUM, "config": {"min_terms": 10}}, "k.reasoning_gym.0.config = {'min_terms': 10}: AssertionError: max_"),
    ],
)
def test_what_the_package_does_not_have(
    given: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    with pytest.raises(DataError, match=re.escape(problem)):
        open_files(ReasoningGymConfig(reasoning_gym=(TaskConfig(**given),)), "k")
    assert not list(tmp_path.rglob("*.jsonl")) and not list(tmp_path.rglob("*.part"))
