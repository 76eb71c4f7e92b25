"""Runs with an environment that are replayed, or that end between a rollout and its update."""

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.environments.rollouts_worker import named
from tests.environments.tiny_chat import make_chat_inputs
from tests.launch import run_ranks

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
