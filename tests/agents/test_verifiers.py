"""Environments of the package verifiers, in an environment of packages that the index gives, on real engines."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hybridflow.agents.completions import TokenCompletion, generated
from hybridflow.environments.verifiers_agent import number_of_tasks, run, task_problem
from hybridflow.errors import ConfigError, RewardError
from tests.agents.test_runs import furthest_log_prob, metrics, rollout, tensors, turns
from tests.agents.verifiers_envs.names import NUM_TASKS
from tests.environments.tiny_chat import END, make_chat_inputs, run_config
from tests.environments.versions import checked_ages
from tests.launch import run_ranks

PARTIAL_ITERATIONS = 3

# ------------------------------------------------------------------------------------------------ without verifiers


@pytest.mark.parametrize(
    ("columns", "num_tasks", "problem"),
    [
        ({"task": 0}, 16, ""),
        ({"task": 15}, 16, ""),
        ({"task": 9999}, None, ""),
        ({"task": 16}, 16, "the column task is 16; the environment has tasks 0 to 15"),
        ({"task": "3"}, 16, "the column task is '3'; a row has the number of a task of verifiers, from 0"),
        ({"task": True}, 16, "the column task is True; a row has the number of a task of verifiers, from 0"),
        ({"task": -1}, None, "the column task is -1; a row has the number of a task of verifiers, from 0"),
        ({"question": "1"}, 16, "the column task is missing; a row has the number of a task of verifiers, from 0"),
    ],
)
def test_a_row_names_a_task(columns: dict[str, Any], num_tasks: int | None, problem: str) -> None:
    assert task_problem(columns, num_tasks) == problem


def test_a_python_that_does_not_start_or_lacks_the_package_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^data.environment.python = /nowhere/python: does not start: No such file"):
        number_of_tasks("two_turns", "/nowhere/python", {})
    with pytest.raises(ConfigError, match=r"^data.environment.verifiers = two_turns: ModuleNotFoundError: No module"):
        number_of_tasks("two_turns", sys.executable, {})


ONE_ANSWER = """#!/bin/sh
echo '{"tasks": 1, "problem": ""}'
read line
echo '{"call": 0, "reward": 0.5, "scores": {}, "problem": ""}'
read line
"""


def test_a_process_that_has_ended_gets_a_successor(tmp_path: Path) -> None:
    """In the place of a Python: a program that answers once, and ends when it is asked again."""
    program = tmp_path / "python"
    program.write_text(ONE_ANSWER)
    program.chmod(0o755)

    async def play() -> float | dict[str, float]:
        return await run("http://nowhere", {"task": 0}, name="any", python=str(program), arguments={})

    async def rows() -> list[Any]:
        first = await play()
        with pytest.raises(RewardError, match="the process of verifiers has ended with status 0"):
            await play()
        return [first, await play()]

    assert asyncio.run(asyncio.wait_for(rows(), 60)) == [0.5, 0.5]


# ------------------------------------------------------------------------------------------------ with verifiers


def with_verifiers(test: Any) -> Any:
    """600 MB of packages from the index."""
    return pytest.mark.thorough(pytest.mark.timeout(1800)(test))


@pytest.fixture(scope="module")
def root(python: str, found_there: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("runs"))
    (root / "tasks.jsonl").write_text("".join(json.dumps({"task": task}) + "\n" for task in range(NUM_TASKS)))
    # Task 2 raises when it is scored, which would end the run before the names of parts are read.
    (root / "scored.jsonl").write_text("".join(json.dumps({"task": task}) + "\n" for task in (0, 1, 3, 0)))
    config = run_config(root, max_response_length=64)
    config["num_iterations"], config["data"]["train"] = 1, str(root / "tasks.jsonl")
    del config["data"]["heldout"]
    (root / "config.yaml").write_text(json.dumps(config))

    def environment(**more: Any) -> str:
        return "data.environment=" + json.dumps({"verifiers": "two_turns", "python": python, "num_workers": 1, **more})

    partial = [f"num_iterations={PARTIAL_ITERATIONS}", "rollout.max_staleness=1", "rollout.partial={oversample: 1.5}"]
    partial += ["sampling.samples_per_prompt=2", "checkpoint={load: none, save_interval: 1, keep_last: 9}"]
    cases = {
        "two turns": [environment(max_turn_tokens=16)],
        "partial": [environment(max_turn_tokens=16), *partial],
        "parts": [environment(max_turn_tokens=16, parts={"said": 1.0, "number": 0.5})],
        "other parts": [
            environment(max_turn_tokens=16, parts={"nobody": 1.0}, on_error="end_run"),
            f"data.train={root / 'scored.jsonl'}",
        ],
        "one turn": [environment(max_turn_tokens=16, max_turns=1)],
        **{
            name: [environment(verifiers="two_agents", arguments=given, earlier_turns="branch", on_error="end_run")]
            for name, given in (("not trained", {}), ("both trained", {"trains_other": True}))
        },
    }
    (root / "cases.json").write_text(json.dumps(cases))
    files = [root / name for name in ("config.yaml", "told.json", "cases.json")]
    there = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    run_ranks(1, "tests.agents.verifiers_worker", *files, environment=there)
    return root


@pytest.fixture(scope="module")
def told(root: Path) -> dict[str, str]:
    return json.loads((root / "told.json").read_text())


@with_verifiers
def test_what_is_wrong_with_an_environment_is_told_at_the_start(python: str, found_there: None) -> None:
    assert number_of_tasks("two_turns", python, {}) == NUM_TASKS
    for name, arguments, problem in (
        ("nobodys", {}, r"ModuleNotFoundError: taskset 'nobodys' not found"),
        ("two_turns", {"agnt": {}}, r"ValidationError: .* agnt Extra inputs are not permitted"),
        ("two_turns", {"agent": {"runtime": {"type": "prime"}}}, r"ValueError: agent.runtime.type = prime: is Prime's"),
    ):
        with pytest.raises(ConfigError, match=f"^data.environment.verifiers = {name}: {problem}"):
            number_of_tasks(name, python, arguments)


READS = """
import json, sys
from renderers.client import _parse_completion_logprobs, parse_generate_response
choice = parse_generate_response(sys.stdin.buffer.read())["choices"][0]
log_probs = _parse_completion_logprobs(choice, choice["token_ids"])
print(json.dumps([choice["token_ids"], log_probs, choice["finish_reason"]]))
"""


@with_verifiers
def test_the_training_client_of_verifiers_reads_what_a_request_of_tokens_is_answered(python: str) -> None:
    told = generated(TokenCompletion("a-1", [7, 300], [-0.25, -1.5], "length", 3), "policy")
    ran = subprocess.run([python, "-c", READS], input=json.dumps(told), capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [[7, 300], [-0.25, -1.5], "length"]


@with_verifiers
@pytest.mark.distributed
def test_an_episode_is_a_row(root: Path, told: dict[str, str]) -> None:
    """Task 2 of 0 to 3 raises when it is scored: its rows have failed."""
    assert told["two turns"] == ""
    batch, tokenizer = rollout(root, "two turns"), AutoTokenizer.from_pretrained(root / "policy")
    failed = [False] * 8 + [True] * 4 + [False] * 4
    assert batch.failed.tolist() == failed
    assert float(metrics(root, "two turns")[0]["environment/failed_rows"]) == 4
    assert furthest_log_prob(root, batch) < 1e-4
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths.cumsum(0)[:-1]]).tolist()
    for row in [row for row in range(16) if not failed[row]]:
        task, parts = row // 4, turns(batch, row)
        prompt = batch.input_ids[starts[row] : starts[row] + int(batch.prompt_lengths[row])]
        assert tokenizer.decode(prompt) == f"<|user|>{task}+{task}={END}<|assistant|>"
        assert [by for by, _ in parts] == [True, False, True]
        assert tokenizer.decode(parts[1][1]).endswith(f"<|user|>more{END}<|assistant|>")
    advantages = tensors(root, "two turns")["advantages"]
    assert (advantages[~batch.response_mask] == 0).all() and advantages.isfinite().all()


@with_verifiers
@pytest.mark.distributed
def test_rewards_are_those_of_verifiers(root: Path, told: dict[str, str]) -> None:
    """A weight of 2 is the environment's own; with parts the config's weights count."""
    assert told["parts"] == ""
    one, parts = rollout(root, "two turns").environment_rewards, rollout(root, "parts").environment_rewards
    numbers = torch.tensor([0.0, 1.0, float("nan"), 3.0]).repeat_interleave(4)
    assert torch.equal(parts[:, 1].nan_to_num(-1), numbers.nan_to_num(-1))
    assert torch.allclose(one[:, 0], parts[:, 0] + 2 * numbers, equal_nan=True)
    assert len(set(parts[:4, 0].tolist())) > 1, "what was said differs"
    assert "data.environment.parts.nobody: no reward of the environment has this name; there are" in told["other parts"]


@with_verifiers
@pytest.mark.distributed
def test_a_row_without_a_turn_left_counts_what_it_has(root: Path, told: dict[str, str]) -> None:
    assert told["one turn"] == ""
    batch = rollout(root, "one turn")
    assert [len(turns(batch, row)) for row in range(4)] == [1] * 4


@with_verifiers
@pytest.mark.distributed
def test_one_agent_of_an_environment_is_trained(told: dict[str, str]) -> None:
    """Another that is not, such as a judge, needs a model of its own."""
    assert "the agent other of the environment is not trained: give it a model of its own" in told["not trained"]
    assert "the episode has 2 agents that are trained; a row is of one" in told["both trained"]


@with_verifiers
@pytest.mark.distributed
def test_a_task_waits_while_the_models_train(root: Path, told: dict[str, str], tmp_path: Path) -> None:
    """Each token has the log-prob of the version that chose it."""
    assert told["partial"] == ""
    assert checked_ages(root / "runs" / "partial", PARTIAL_ITERATIONS, tmp_path) == {0, 1}
    assert [float(row["rollout/groups_under_way"]) for row in metrics(root, "partial")] == [2.0] * PARTIAL_ITERATIONS
