"""What is refused when a run starts: agents that are none, and configs that cannot be."""

import re
from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.environments.agents import agent_file
from hybridflow.errors import ConfigError

USERS = "tests.agents.agents_of_users"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "arguments", "problem"),
    [
        ("nowhere:run", {}, "data.environment.agent nowhere:run: cannot import nowhere"),
        (f"{USERS}:nobody", {}, "has no nobody"),
        (f"{USERS}:no_coroutine", {}, "is no `async def`; an agent is `async def run(base_url, row)`"),
        (f"{USERS}:takes_one", {}, "is called as run(base_url, row) with data.environment.arguments, here none"),
        (f"{USERS}:calculator", {"turn": 3}, "here turn: got an unexpected keyword argument 'turn'"),
    ],
)
def test_what_is_no_agent_is_refused(path: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        agent_file(path, arguments)


def test_an_agent_is_found_with_its_file() -> None:
    file = agent_file(f"{USERS}:calculator", {"turns": 2})
    assert file is not None and file.endswith("tests/agents/agents_of_users.py")


BASE = ["reward=null", "data.chat_template=true", "metrics.eval_reward=null"]
TOKEN = "token_file: t.txt"


def config_of(environment: str, *overrides: str) -> ExperimentConfig:
    given = [*BASE, f"data.environment={{{environment}}}", *overrides]
    return ExperimentConfig.from_yaml("configs/quickstart_grpo.yaml", given)


@pytest.mark.parametrize(
    ("environment", "overrides", "problem"),
    [
        ("class: 'a:B', agent: 'a:b'", (), "class = a:B cannot go with agent = a:b: one of them answers"),
        ("max_turns: 3", (), "names nobody who answers the model: give class"),
        ("class: 'a:B', prompt: column", (), "class = a:B cannot go with prompt = column: the key is for an agent"),
        ("agent: nobody", (), "data.environment.agent = 'nobody'"),
        ("agent: 'a:b', prompt: first", (), "data.environment.prompt = 'first'"),
        ("agent: 'a:b', listen: localhost", (), "listen = localhost: is no IP address"),
        ("agent: 'a:b', listen: 10.0.0.7", (), "listen = 10.0.0.7: is reached from other hosts: give token_file"),
        (f"agent: 'a:b', listen: 0.0.0.0, {TOKEN}", (), "listen = 0.0.0.0: names no interface"),
        (
            "agent: 'a:b'",
            ("data.chat_template=false",),
            "environment cannot go with chat_template = false: turns",
        ),
        (
            "agent: 'a:b'",
            ("algorithm={name: remax}", "reference=null"),
            "data.environment cannot go with algorithm.name = remax: remax compares",
        ),
        (
            "class: 'a:B'",
            ("reward={models: [{model: other, reencode: true}]}",),
            "data.environment cannot go with reward.models.0.reencode = true: the reward model's template",
        ),
        (
            "agent: 'a:b'",
            ("sampling.by_prompt_length=[{up_to: 8, max_response_length: 16}]",),
            "sampling.by_prompt_length cannot go with data.environment.prompt = request: by_prompt_length needs",
        ),
    ],
)
def test_configs_that_cannot_be_are_refused(environment: str, overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        config_of(environment, *overrides)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.0.0.9"])
def test_a_loopback_address_needs_no_token(address: str) -> None:
    found = config_of(f"agent: 'a:b', listen: '{address}'").data.environment
    assert found is not None and (found.listen, found.token_file) == (address, None)


def test_prompts_may_be_those_of_the_data_file() -> None:
    own, given = (config_of(f"agent: 'a:b', prompt: {prompt}").data.environment for prompt in ("request", "column"))
    assert own is not None and given is not None and (own.begins_rows, given.begins_rows) == (True, False)
