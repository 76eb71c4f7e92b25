"""The classes and adapters of docs/guides/environments-from-others.md, called and trained."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.environments import ModelTurn
from hybridflow.environments.classes import described
from tests.environments.tiny_chat import make_tokenizer
from tests.launch import ROOT, run_ranks
from tests.tiny_models import make_checkpoints

PAGE = ROOT / "docs" / "guides" / "environments-from-others.md"
ASKS = {"prompt": [{"role": "user", "content": "Guess."}], "target": 4}
# class, arguments of the class, a row, what its rows need
ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "from_trl:Adapted": ({}, ASKS, None),
    "from_verl:Multiplies": ({}, {**ASKS, "reward_model": {"ground_truth": "42"}}, None),
    "from_verifiers:Guess": ({}, ASKS, None),
    "from_skyrl:Adapted": ({}, ASKS, "skyrl_gym"),
    "arena:Arena": ({"game": "GuessTheNumber-v0-raw"}, {"seed": 3}, "textarena"),
}


def adapters() -> list[Any]:
    return [
        pytest.param(
            path,
            marks=pytest.mark.skipif(
                needed is not None and importlib.util.find_spec(needed) is None, reason=f"{needed} is not installed"
            ),
        )
        for path, (_, _, needed) in ADAPTERS.items()
    ]


def written(directory: Path) -> Path:
    """DIRECTORY with the page's modules."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = re.match(r"# (\w+\.py)\b", block)
        assert name is not None, "a block begins with its file's name"
        (directory / name[1]).write_text(block)
    return directory


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = written(tmp_path_factory.mktemp("adapters"))
    sys.path.append(str(directory))
    yield directory
    sys.path.remove(str(directory))


def instance(path: str, arguments: dict[str, Any]) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def said(text: str, turn: int = 1, *, last: bool = False) -> ModelTurn:
    return ModelTurn(text, False, turn, 100, last)


@pytest.mark.slow
@pytest.mark.parametrize("path", adapters())
def test_each_is_an_environment(path: str, modules: Path) -> None:
    arguments, row, _ = ADAPTERS[path]
    schemas = described(path, arguments).schemas
    names = {"from_trl:Adapted": ["guess"], "from_verl:Multiplies": ["multiply"]}.get(path, [])
    assert [schema["function"]["name"] for schema in schemas] == names
    first = instance(path, arguments).start(row)
    assert first == instance(path, arguments).start(row), "the same row begins alike"
    assert [message["role"] for message in first] == ["user"] and isinstance(first[0]["content"], str)


def test_of_trl(modules: Path) -> None:
    its = instance("from_trl:Adapted", {})
    assert its.start(ASKS) == [{"role": "user", "content": "Guess. My number is from 1 to 9."}]
    assert (its.guess(n=3), its.step(said("3"))) == ("no", 0.0)
    assert (its.guess(n=4), its.step(said("4"))) == ("yes", 1.0)
    assert ASKS["prompt"][0]["content"] == "Guess."


def test_of_verl(modules: Path) -> None:
    its = instance("from_verl:Multiplies", {})
    assert its.start({"prompt": ASKS["prompt"], "reward_model": {"ground_truth": "42"}}) == ASKS["prompt"]
    assert its.multiply(6, 7) == "42" and its.step(said("It is 42.")) == 1.0 and its.step(said("41")) == 0.0


def test_of_verifiers(modules: Path) -> None:
    its = instance("from_verifiers:Guess", {})
    its.start(ASKS)
    assert its.step(said("3")) == [{"role": "user", "content": "no"}]
    assert its.step(said(" 4", 2)) == 1.0 and its.step(said("5", 2)) == 0.0
    assert its.step(said("5", 1, last=True)) == 0.0


def test_of_skyrl(modules: Path) -> None:
    pytest.importorskip("skyrl_gym")
    its = instance("from_skyrl:Adapted", {})
    assert its.start(ASKS) == ASKS["prompt"]
    assert its.step(said("3")) == [{"role": "user", "content": "no"}]
    assert its.step(said("4", 2)) == 1.0
    its.close()
    late = instance("from_skyrl:Adapted", {})
    late.start(ASKS)
    assert late.step(said("3", last=True)) == 0.0


def test_of_textarena(modules: Path) -> None:
    """The number is found by what the game says, which is new alone each time."""
    pytest.importorskip("textarena")
    its = instance("arena:Arena", {"game": "GuessTheNumber-v0-raw"})
    [first] = its.start({"seed": 3})
    assert "guess the number between 1 and 20" in first["content"]
    low, high, answer = 1, 20, None
    while not isinstance(answer, float):
        guess = (low + high) // 2
        answer = its.step(said(f"[{guess}]"))
        if isinstance(answer, list):
            told = answer[0]["content"]
            assert told in ("The target number is lower.", "The target number is higher.")
            low, high = (low, guess - 1) if "lower" in told else (guess + 1, high)
    assert answer == 1.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_checkpoints(
        tmp_path_factory.mktemp("adapted"), family="llama", tied=False, head_dim=32, max_length=1536
    )
    make_tokenizer().save_pretrained(root / "policy")
    written(root)
    tree = {
        "name": "run",
        "seed": 1,
        "output_dir": str(root),
        "num_iterations": 2,
        "data": {"train": "", "chat_template": True, "prompts_per_iteration": 2, "max_prompt_length": 700},
        "sampling": {"samples_per_prompt": 2, "max_response_length": 400},
        "actor": {"model": str(root / "policy"), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        "rollout": {"kv_cache_gib": 0.0625},
        "algorithm": {"name": "rloo", "kl": {"use": "none"}},
        "metrics": {"tensorboard": False, "dump_batches": True},
        "checkpoint": {"load": "none"},
    }
    (root / "config.yaml").write_text(json.dumps(tree))
    return root


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("path", adapters())
def test_each_trains(path: str, root: Path) -> None:
    """The random model's rows have turns of both sides, and rewards of the class."""
    from tests.environments.test_rollouts import rollout, turns

    arguments, row, _ = ADAPTERS[path]
    name = path.replace(":", "_")
    (root / f"{name}.jsonl").write_text("".join(json.dumps({**row, "number": i}) + "\n" for i in range(4)))
    environment = {"class": path, "arguments": arguments, "max_turns": 3, "max_turn_tokens": 4}
    given = [f"name={name}", f"data.train={root / f'{name}.jsonl'}", f"data.environment={json.dumps(environment)}"]
    run_ranks(1, "hybridflow.train", root / "config.yaml", *given)
    (root / "runs").mkdir(exist_ok=True)
    (root / "runs" / name).symlink_to(root / name)
    batch = rollout(root, name, 2)
    assert len(batch) == 4 and not batch.failed.any()
    assert batch.environment_rewards.min() >= 0 and batch.environment_rewards.max() <= 1
    answered = [sum(not by for by, _ in turns(batch, i)) for i in range(4)]
    # of three turns; TextArena ends a game with the second move that it cannot read
    expected = {"from_skyrl:Adapted": {2}, "arena:Arena": {1}, "from_verifiers:Guess": {0, 1}}
    assert set(answered) <= expected.get(path, {0, 1, 2})  # calls of tools that are not there, by chance
