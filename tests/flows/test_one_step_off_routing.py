"""One-step-off rollouts of a mixture of experts whose trainer replays the engine's experts, beside synchronous runs."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.kills import rows
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.test_one_step_off import GRPO, NUM_ITERATIONS, OTHER, batch
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

pytestmark = pytest.mark.distributed

REPLAY = "algorithm=" + json.dumps(GRPO | {"kl": {"use": "none"}, "policy": {**GRPO["policy"], "replay_routing": True}})
COMMON = [f"num_iterations={NUM_ITERATIONS}", "actor.ranks=0", "rollout.ranks=1", "critic=null", "reference=null"]
COMMON += ["sampling.samples_per_prompt=2", "metrics.dump_batches=true", "actor.tensor_parallel_size=1", REPLAY]
STALE, STILL = "rollout.max_staleness=1", "actor.optimizer.lr=0"
RUNS = {"synchronous": [STILL], "stale": [STILL, STALE], "learns": [STALE, "actor.optimizer.lr=0.01"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one_step_off")
    inputs, changes = make_inputs(root / "inputs"), {"num_experts": 16, "num_experts_per_tok": 2}
    make_checkpoints(inputs, family="qwen3_moe", tied=False, head_dim=32, num_layers=3, changes=changes)
    config = write_config(root / "config.yaml", inputs)
    tree = json.loads(config.read_text())
    tree["reward"]["models"][0]["ranks"] = "0"
    config.write_text(json.dumps(tree))
    runs = {name: [*COMMON, *overrides] for name, overrides in RUNS.items()}
    run_ranks(2, "tests.flows.one_step_off_worker", config, json.dumps(runs))
    return root


def test_with_a_learning_rate_of_zero_it_is_the_synchronous_run(root: Path) -> None:
    stale, synchronous = rows(root / "stale", OTHER), rows(root / "synchronous", OTHER)
    assert len(stale) == NUM_ITERATIONS and stale == synchronous
    ages = [float(row["rollout/staleness_mean"]) for row in rows(root / "stale")]
    assert ages == [0.0, 1.0, 1.0, 1.0, 1.0]
    for iteration in range(1, NUM_ITERATIONS + 1):
        found, expected = batch(root / "stale", iteration), batch(root / "synchronous", iteration)
        for name in ("input_ids", "routed_experts", "rollout_log_probs"):
            assert torch.equal(found[name], expected[name]), name


def test_experts_of_older_weights_are_replayed(root: Path) -> None:
    """The engine's choices of the version before, where the trainer would choose others by now."""
    differ = [float(row["rollout/experts_differ"]) for row in rows(root / "learns")]
    still = [float(row["rollout/experts_differ"]) for row in rows(root / "stale")]
    assert len(differ) == NUM_ITERATIONS and sum(differ[1:]) > sum(still[1:])
