"""Runs with an environment that are replayed, or killed between two turns."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.parallel.child_processes import children
from tests.environments.rollouts_worker import named
from tests.environments.tiny_chat import make_chat_inputs
from tests.launch import ROOT, of_no_rank, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("resume"))
    tree = {
        "name": "run",
        "seed": 1,
        "output_dir": str(root),
        "num_iterations": 2,
        "data": {
            "train": str(root / "train.jsonl"),
            "chat_template": True,
            "prompts_per_iteration": 4,
            "max_prompt_length": 32,
        },
        "sampling": {"samples_per_prompt": 4, "max_response_length": 64},
        "actor": {"model": str(root / "policy"), "dtype": "float32", "optimizer": {"lr": 1e-3}},
        "rollout": {"kv_cache_gib": 0.0625},
        "algorithm": {"name": "grpo", "kl": {"use": "none"}, "update": {"mini_batch_size": 8}},
        "metrics": {"tensorboard": False, "dump_batches": True},
        "checkpoint": {"save_interval": 1},
    }
    (root / "config.yaml").write_text(json.dumps(tree))
    return root / "config.yaml"


def train(config: Path, *overrides: str) -> None:
    run_ranks(1, "hybridflow.train", config, named("Talk", max_turn_tokens=12), *overrides)


def batch(config: Path, name: str, iteration: int) -> dict[str, torch.Tensor]:
    return load_file(config.parent / name / "batches" / f"iteration_{iteration:06d}.safetensors")


@pytest.fixture(scope="module")
def whole(config: Path) -> dict[str, torch.Tensor]:
    """The second batch of a run that nobody ends."""
    train(config, "name=whole")
    return batch(config, "whole", 2)


def test_a_replay_takes_turns_and_rewards_from_the_file(config: Path, whole: dict[str, torch.Tensor]) -> None:
    run_ranks(
        1,
        "hybridflow.train",
        "--replay",
        config.parent / "whole",
        config,
        named("Talk", max_turn_tokens=12),
        "name=again",
        "num_iterations=1",
        "checkpoint.load=none",
    )
    then, now = batch(config, "whole", 1), batch(config, "again-replay", 1)
    for name in ("input_ids", "response_mask", "environment_rewards", "advantages"):
        assert torch.equal(then[name], now[name]), name


def test_a_run_that_is_killed_between_turns_makes_the_rollout_again(
    config: Path, whole: dict[str, torch.Tensor]
) -> None:
    """Its workers end with it, and what it makes then is what an undisturbed run has made."""
    slow = named("Talk", max_turn_tokens=12, arguments={"delay": 1.0})
    command = [sys.executable, "-m", "hybridflow.train", str(config), slow, "name=killed"]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29791"}
    environment = of_no_rank(**ranks, PYTHONPATH=str(ROOT))
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        first = config.parent / "killed" / "batches" / "iteration_000001.safetensors"
        wait_for(lambda: first.exists() or process.poll() is not None, 300)
        time.sleep(0.5)  # in the second rollout, whose answers take seconds
        below = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
    assert below, "supervisor and workers"
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() and alive(pid) for pid in below), 30)
    train(config, "name=killed", "checkpoint.load=auto", "data.environment.arguments={}")
    found = batch(config, "killed", 2)
    for name in ("input_ids", "response_mask", "environment_rewards"):
        assert torch.equal(found[name], whole[name]), name


def test_a_rollout_that_was_kept_is_not_made_again(config: Path, whole: dict[str, torch.Tensor]) -> None:
    """The run ends between the rollout and its update, and goes on with its turns, masks and rewards."""
    kept = [named("Talk", max_turn_tokens=12), "name=kept", "checkpoint.save_rollout=true", "checkpoint.load=auto"]
    stopped = run_ranks(1, "hybridflow.train", config, *kept, "checkpoint.max_hours=1e-9", check=False)
    assert "the run is saved" in stopped.stdout and stopped.returncode
    file = config.parent / "kept" / "checkpoints" / "rollout" / "batches" / "iteration_000001.safetensors"
    assert torch.equal(load_file(file)["environment_rewards"], batch(config, "whole", 1)["environment_rewards"])
    run_ranks(1, "hybridflow.train", config, *kept)
    for iteration in (1, 2):
        found, then = batch(config, "kept", iteration), batch(config, "whole", iteration)
        for name in ("input_ids", "response_mask", "environment_rewards", "advantages"):
            assert torch.equal(found[name], then[name]), (iteration, name)
    first, second = csv.DictReader((config.parent / "kept" / "metrics.csv").open())
    assert float(first["reshard/bytes_permuted"]) == 0 < float(second["reshard/bytes_permuted"])


def wait_for(done: object, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    own = children(pid)
    return [*own, *(below for child in own for below in descendants(child))]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
