"""A run that saves is the same run, and so is one that resumes, however the engine has the weights: in the actor's
memory as it lies or permuted there, or gathered into memory of its own, for which the actor's storages are emptied.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.kills import COSTS
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints, make_prompts

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 4
TP2 = ["actor.tensor_parallel_size=2"]
TP2_TO_1 = [*TP2, "rollout.tensor_parallel_size=1"]
EP2 = ["actor.expert_parallel_size=2", "rollout.enable_expert_parallel=false"]  # of two replicas
IN_BACKGROUND = ["checkpoint.async_save=true"]
CASES = {  # the model, and how it lies
    "gathered": ("wide", [*TP2_TO_1, *IN_BACKGROUND]),
    "gathered-experts": ("experts", EP2),
    "aliased": ("narrow", [*TP2, *IN_BACKGROUND]),
    "permuted": ("wide", TP2),
    "aliased-experts": ("experts", TP2),
    "permuted-experts": ("experts", IN_BACKGROUND),
}
DEFAULT = ("gathered", "gathered-experts")
NAMES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
CONFIG = {
    "name": "run",
    "seed": 1,
    "num_iterations": NUM_ITERATIONS,
    "data": {"prompts_per_iteration": 4, "max_prompt_length": 12},
    "sampling": {"samples_per_prompt": 2, "max_response_length": 8},
    "actor": {"dtype": "float32", "optimizer": {"lr": 1e-3}},
    "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
    "rollout": {"kv_cache_gib": 0.0625},
    "algorithm": {"name": "reinforce", "baseline": "none", "kl": {"use": "none"}},
    "metrics": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, selected: Callable[..., set[str]]) -> Path:
    """With two groups of heads each rank has one, whose rows lie alike in trainer and engine; with four they do not."""
    root = tmp_path_factory.mktemp("engine_layouts")
    for name, family, heads in (("narrow", "llama", 2), ("wide", "llama", 4), ("experts", "qwen3_moe", 2)):
        make_checkpoints(root / name, family=family, tied=False, head_dim=32, num_kv_heads=heads)
    make_prompts(root / "train.jsonl", 16)
    config = CONFIG | {"data": CONFIG["data"] | {"train": str(root / "train.jsonl")}}
    (root / "config.yaml").write_text(json.dumps(config))
    run_ranks(2, "tests.checkpoint.engine_layouts_worker", root, *sorted(selected("name")))
    return root


@pytest.mark.parametrize("name", NAMES)
def test_saving_and_resuming_change_nothing(name: str, root: Path) -> None:
    unsaved, saved = root / f"{name}-unsaved", root / f"{name}-saved"
    numbers = [{key: x for key, x in row.items() if not any(part in key for part in COSTS)} for row in rows(unsaved)]
    assert len({row["rollout/response_length_mean"] for row in numbers}) > 1
    assert [{key: row[key] for key in numbers[0]} for row in rows(saved)] == numbers
    expected, found = (load_file(run / "hf" / "model.safetensors") for run in (unsaved, saved))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_has_its_weights_in_the_way_that_the_case_says(name: str, root: Path) -> None:
    way = name.split("-")[0]
    for row in rows(root / f"{name}-saved"):
        permuted, received = (float(row[f"reshard/bytes_{what}"]) for what in ("permuted", "received"))
        own = float(row["memory/engine_own_weight_bytes"])
        assert (received > 0, own > 0) == (way == "gathered", way == "gathered")
        assert way == "gathered" or (permuted > 0) == (way == "permuted")


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["iteration"] for row in found] == [str(i) for i in range(1, NUM_ITERATIONS + 1)]
    return found
