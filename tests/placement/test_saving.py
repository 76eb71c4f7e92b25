"""What a save writes and copies: the estimate against `prepare_save` of live models, and by hand."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import CheckpointConfig, ExperimentConfig
from hybridflow.placement.placed import PlacedRun, place
from hybridflow.placement.saving import most_kept, written_bytes, zero1_shares
from tests.checkpoint.layouts import LAYOUTS, OPTIMIZERS
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

BUCKET_BYTES = 1 << 14  # several buckets an actor: shares begin and end within parameters
# family -> tied
MODELS = {
    "llama": False,
    "qwen2": True,
    "opt": True,
    "opt_350m": True,
    "qwen3_moe": True,
    "mixtral": False,
    "qwen3_5": True,
    "deepseek_v3": False,
    "moonlight": False,
}


@dataclass(frozen=True)
class Case:
    model: str
    actor: str
    critic: str
    optimizer: str = "adam"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.model} {self.actor} {self.critic} {self.optimizer} {self.dtype}"


CASES = (
    Case("llama", "tp2dp2", "pp2dp2", dtype="bfloat16"),
    Case("llama", "pp2", "vpp2"),
    Case("llama", "tp2", "tp2dp2"),
    Case("llama", "tp2pp2", "dp4", "adam whole", "bfloat16"),
    Case("llama", "pp2dp2", "tp2dp2", "momentum", "bfloat16"),
    Case("llama", "tp1", "dp4", "sgd"),
    Case("qwen2", "pp2dp2", "tp2dp2", dtype="bfloat16"),
    Case("qwen2", "tp2pp2", "dp2"),
    Case("opt", "pp2dp2", "dp4"),
    Case("opt_350m", "tp2pp2", "pp2dp2"),
    Case("opt_350m", "pp2dp2", "dp4", dtype="bfloat16"),
    Case("qwen3_moe", "tp2dp2", "pp2dp2", dtype="bfloat16"),
    Case("mixtral", "dp4", "tp2dp2"),
    Case("qwen3_5", "tp2pp2", "pp2dp2", dtype="bfloat16"),
    Case("deepseek_v3", "tp2dp2", "pp2dp2", dtype="bfloat16"),
    Case("moonlight", "pp2dp2", "dp4"),
)


def placed(models: Path, case: Case) -> PlacedRun:
    def role(name: str, layout: dict[str, Any]) -> dict[str, Any]:
        model = {"model": str(models / case.model / name), "dtype": case.dtype}
        return model | {"optimizer": OPTIMIZERS[case.optimizer]} | layout

    config = {
        "name": "saving",
        "num_iterations": 1,
        "data": {"train": "given", "prompts_per_iteration": 8, "max_prompt_length": 9},
        "sampling": {"max_response_length": 8},
        "actor": role("policy", LAYOUTS[case.actor]),
        "critic": role("critic", LAYOUTS[case.critic]),
        "reference": {"model": str(models / case.model / "policy")},  # on every rank
        "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
    }
    return place(ExperimentConfig.model_validate(config), 4)


# ------------------------------------------------------------------------------------------------ live models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saving")
    for family, tied in MODELS.items():
        make_checkpoints(root / family, family=family, tied=tied, num_layers=4)
    return root


@pytest.fixture(scope="module")
def live(models: Path) -> list[dict[str, list[int]]]:
    """Of each rank: by case and role the bytes of its chunks, and of copies of them."""
    run_ranks(4, "tests.placement.saving_worker", models, models / "out")
    return json.loads((models / "out" / "found.json").read_text())


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_rank_writes_what_is_estimated(models: Path, live: list[dict[str, list[int]]], case: Case) -> None:
    run = placed(models, case)
    for role, bucket_bytes in (("actor", BUCKET_BYTES), ("critic", None)):
        expected = written_bytes(run.models[role], bucket_bytes=bucket_bytes)
        found = [rank[f"{case.name}/{role}"] for rank in live]
        assert found == [[expected.get(rank, 0)] * 2 for rank in range(4)], role
        assert sum(expected.values()) > 10_000


# ------------------------------------------------------------------------------------------------ by hand


def test_shares_of_one_bucket_by_hand() -> None:
    # the last parameter comes first: at 0 .. 100; then at 128 .. 428, padded to 512: halves of 256
    assert zero1_shares([300, 100], alone=(), bucket_elements=None, copies=2) == [[128, 172], [100, 0]]


def test_shares_of_several_buckets_by_hand() -> None:
    # 100 and 200 of the last two are enough: 0 .. 100, 128 .. 328, padded to 384; 384 .. 394, padded to 512
    assert zero1_shares([10, 200, 100], alone=(), bucket_elements=300, copies=2) == [[10, 0], [64, 136], [100, 0]]
    # one for itself: 0 .. 10 in 128; 128 .. 328 in 256; 384 .. 484 in 128
    assert zero1_shares([100, 200, 10], alone=(1,), bucket_elements=None, copies=2) == [[64, 36], [128, 72], [10, 0]]


@pytest.mark.parametrize(
    ("keys", "num_iterations", "expected"),
    [
        ({"save_minutes": None}, 100, 1),  # a stop's
        ({}, 100, 3),  # by the time
        ({}, 2, 2),
        ({"save_interval": 10}, 100, 3),
        ({"save_interval": 10}, 15, 2),  # after 10 and 15
        ({"save_interval": 10, "keep_last": 1, "keep_best": 2}, 100, 4),
        ({"save_interval": 10, "keep_last": 1, "keep_every": 25}, 100, 4),  # 50, 100
        ({"save_interval": 10, "keep_last": 1, "keep_every": 5}, 95, 10),  # all, and none before
        ({"save_interval": 30, "keep_last": 1, "keep_every": 40}, 160, 4),  # 120, and the last
    ],
)
def test_how_many_are_kept(keys: dict[str, int | None], num_iterations: int, expected: int) -> None:
    assert most_kept(CheckpointConfig(**keys), num_iterations) == expected
