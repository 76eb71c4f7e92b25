"""Partial rollouts of agents in whole runs: OpenAI's client as it is, whose requests wait while the models train."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.runs_worker import named
from tests.environments.rollouts_worker import ONE
from tests.environments.tiny_chat import make_chat_inputs, run_config
from tests.environments.versions import checked_ages, rollout_of
from tests.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

NUM_ITERATIONS = 3
COMMON = [f"num_iterations={NUM_ITERATIONS}", "checkpoint.save_interval=1", "checkpoint.keep_last=9", ONE]
COMMON += ["sampling.samples_per_prompt=2", "rollout.max_staleness=1", "rollout.partial={oversample: 1.5}"]
COMMON += ["algorithm.update.mini_batch_size=8"]
LATE: dict[str, Any] = {"arguments": {"delay": 0.02}, "max_turn_tokens": 16}
RUNS = {
    "calculator": [named("calculator", **LATE), "metrics.eval_interval=1"],
    "sub-agents": [named("with_sub_agents", earlier_turns="branch", **LATE)],
}
ON_TWO = {
    "calculator-tp-2": [named("calculator", **LATE), "actor.tensor_parallel_size=2"],
    "sub-agents-dp-2": [named("with_sub_agents", earlier_turns="branch", **LATE)],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("partial"))
    (root / "config.yaml").write_text(json.dumps(run_config(root, max_response_length=160)))
    for num_ranks, runs in ((1, RUNS), (2, ON_TWO)):
        given = json.dumps({name: [*COMMON, *overrides] for name, overrides in runs.items()})
        run_ranks(num_ranks, "tests.flows.one_step_off_worker", root / "config.yaml", given)
    return root


@pytest.mark.parametrize("name", [*RUNS, *ON_TWO])
def test_every_token_has_the_log_prob_of_the_version_that_chose_it(name: str, root: Path, tmp_path: Path) -> None:
    assert checked_ages(root / "runs" / name, NUM_ITERATIONS, tmp_path) == {0, 1}
    for iteration in range(1, NUM_ITERATIONS + 1):
        batch = rollout_of(root / "runs" / name, iteration)
        assert not batch.failed.any() and (batch.branch_starts is not None) == name.startswith("sub-agents")
