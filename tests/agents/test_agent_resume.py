"""A run that is killed while its agents are between two requests, and goes on."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.agents.runs_worker import named
from tests.environments.test_resume import alive, descendants, wait_for
from tests.environments.tiny_chat import make_chat_inputs, run_config
from tests.launch import ROOT, free_port, of_no_rank, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

STOPS_AT = 5  # the question of four rows of the second rollout
FIELDS = ("input_ids", "lengths", "prompt_lengths", "response_mask", "truncated", "environment_rewards", "advantages")
METRICS = ("iteration", "reward/score", "rollout/response", "rollout/truncated", "actor/", "environment/failed")
METRICS += ("environment/turns", "environment/written", "environment/tool_calls")  # not those of times and of rounding


def agent(**arguments: object) -> str:
    return named("stops_between", arguments=arguments, max_turn_tokens=16)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("resume"))
    tree = {**run_config(root, max_response_length=160), "checkpoint": {"save_interval": 1}}
    del tree["data"]["heldout"]
    (root / "config.yaml").write_text(json.dumps(tree))
    return root / "config.yaml"


@pytest.fixture(scope="module")
def left_over(config: Path) -> dict[str, list[int]]:
    """Of a rank that was killed: what was below it, and which of that is agents'."""
    (words := config.parent / "words").mkdir()
    stops = agent(at=STOPS_AT, words=str(words))
    command = [sys.executable, "-m", "hybridflow.train", str(config), stops, "name=killed"]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    environment = of_no_rank(**ranks, MASTER_PORT=str(free_port()), PYTHONPATH=str(ROOT))

    def told() -> list[Path]:
        return [word for word in words.iterdir() if not word.suffix]

    with (config.parent / "killed.txt").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_for(lambda: len(told()) == 4 or process.poll() is not None, 300)
        below = descendants(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, (config.parent / "killed.txt").read_text()[-8000:]
    return {"below": below, "agents": [int(pid) for word in told() for pid in word.read_text().split()]}


def file_of(config: Path, name: str, iteration: int) -> Path:
    return config.parent / "runs" / name / "batches" / f"iteration_{iteration:06d}.safetensors"


def metrics(config: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((config.parent / "runs" / name / "metrics.csv").open()))


def test_no_process_of_an_agent_outlives_its_rank(left_over: dict[str, list[int]]) -> None:
    """Neither the workers nor what agents have started there."""
    below, agents = left_over["below"], left_over["agents"]
    assert len(agents) == 8 and set(agents) < set(below), "two of each row, the supervisor's beside them"
    wait_for(lambda: not any(map(alive, below)), 30)


def test_it_makes_the_rollout_again_that_nobody_has_disturbed(config: Path, left_over: dict[str, list[int]]) -> None:
    """The first iteration is not made again, and the second one is as in a run that was never killed."""
    first = file_of(config, "killed", 1)
    assert not file_of(config, "killed", 2).exists() and len(metrics(config, "killed")) == 1
    written = first.stat().st_mtime_ns
    run_ranks(1, "hybridflow.train", config, agent(), "name=killed", "checkpoint.load=auto")
    assert first.stat().st_mtime_ns == written
    run_ranks(1, "hybridflow.train", config, agent(), "name=whole")
    for iteration in (1, 2):
        found, then = (load_file(file_of(config, name, iteration)) for name in ("killed", "whole"))
        for name in FIELDS:
            assert torch.equal(found[name], then[name]), (iteration, name)
        assert torch.allclose(found["rollout_log_probs"], then["rollout_log_probs"], atol=1e-5), iteration
    both = [
        [{key: value for key, value in row.items() if key.startswith(METRICS)} for row in metrics(config, name)]
        for name in ("killed", "whole")
    ]
    assert both[0] == both[1] and len(both[1]) == 2 and {"actor/grad_norm", "reward/score_mean"} <= both[1][1].keys()
