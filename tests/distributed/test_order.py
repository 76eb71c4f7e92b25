"""Whole runs on 8 ranks, with the collectives that CUDA would have, as far as a CPU can make them: one order."""

import json
from pathlib import Path

import pytest

from hybridflow.parallel.collective_order import findings, read
from tests.checkpoint.kills import GROUPS, NO_KL, STALE, grpo
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.environments.rollouts_worker import TALK, named
from tests.environments.tiny_chat import make_chat_inputs, run_config
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

STAGES = "actor.pipeline_parallel_size=2"
STALENESS = "rollout.max_staleness=1"
SMALL = [*GROUPS, "reward.models.0.ranks=0-3"]
# name: config, what is changed
RUNS = {
    "dense": ["text", *SMALL, grpo(), STAGES, "num_iterations=1"],
    "mixture": [
        *("text", *SMALL, grpo(), *NO_KL, "actor.model=ROOT/experts/policy", "actor.tensor_parallel_size=1"),
        *(STAGES, "actor.expert_parallel_size=4", "actor.token_dispatcher=alltoall", "rollout.tensor_parallel_size=2"),
        "num_iterations=1",
    ],
    "context": [
        *("text", *SMALL, grpo(), *NO_KL, "actor.context_parallel_size=2", "actor.micro_batch_tokens=20"),
        "num_iterations=1",
    ],
    "apart": ["text", *SMALL, grpo(**STALE), *NO_KL, STALENESS, "actor.ranks=0-3", "rollout.ranks=4-7"],
    "partial": [
        *("chat", named("Talk", arguments={"delay": 0.02}, **TALK), STALENESS, "rollout.partial={oversample: 1.5}"),
        *("actor.tensor_parallel_size=2", "sampling.samples_per_prompt=2"),
    ],
}
THOROUGH = ("dense", "mixture", "context", "apart", "partial")


@pytest.fixture(scope="module")
def records(cases: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("order")
    write_config(root / "text.yaml", make_inputs(root / "inputs"))
    make_chat_inputs(root / "chat")
    (root / "chat.yaml").write_text(json.dumps(run_config(root / "chat", max_response_length=48)))
    if "mixture" in cases:
        make_checkpoints(root / "experts", family="qwen3_moe", tied=False, head_dim=32)
    runs = {name: [each.replace("ROOT", str(root)) for each in RUNS[name]] for name in RUNS if name in cases}
    runs = {name: [str(root / f"{config}.yaml"), *own] for name, (config, *own) in runs.items()}
    run_ranks(8, "tests.distributed.order_worker", root / "records", json.dumps(runs))
    return root / "records"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.cases(name)]) for name in RUNS])
def test_all_ranks_have_one_order(name: str, records: Path) -> None:
    groups, calls = read(records / name)
    assert sorted(calls) == list(range(8))
    assert findings(groups, calls) == []


def test_two_groups_that_one_rank_enters_the_other_way_round_are_found(records: Path) -> None:
    [found] = findings(*read(records / "swapped"))
    assert found == ""
