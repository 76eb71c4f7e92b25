"""A rank of every flow is killed somewhere, and the flow goes on as if it had not been: every metric that is no time or
memory, every weight, every moment of the optimizer, every rate of learning.
"""

import csv
import json
import random
from pathlib import Path

import pytest

from hybridflow.checkpoint.store import read_manifest, step_name
from tests.checkpoint.test_kills import COSTS, PLACES, start
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.flows_worker import CRITIC_FREE, DISTILL, critic_free
from tests.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

NUM_ITERATIONS = 4
DYNAMIC = {
    "name": "grpo",
    "kl": {"use": "none"},
    "policy": {"loss_mean": "token_mean", "mask_truncated": True, "clip_range_high": 0.28},
    "dynamic_sampling": {"max_generation_rounds": 3},
}
DIGITS = {"functions": [{"function": "tests.flows.dynamic_rewards:first_is_a_digit"}], "overlong": {"buffer": 2}}
FLOWS = {
    # of the flows without a critic, whose checkpoints hold the same, one that generates twice and one by groups
    "remax": critic_free("remax", *CRITIC_FREE["remax"]),
    "reinforce_group": [*critic_free("reinforce"), "algorithm.baseline=group"],
    "distill": DISTILL,
    "vapo": [
        "algorithm={name: ppo, value_gae_lambda: 1.0, length_adaptive_alpha: 0.2, positive_nll_coef: 0.1}",
        "reward.normalization=running",
    ],
    "dynamic_sampling": [
        *("seed=2", "critic=null", "reference=null", "sampling.samples_per_prompt=2"),  # this one has a surplus
        *("reward=" + json.dumps(DIGITS), "algorithm=" + json.dumps(DYNAMIC)),
    ],
}
SETTINGS = [
    *(f"num_iterations={NUM_ITERATIONS}", "checkpoint.save_interval=1", "checkpoint.keep_last=9"),
    *("actor.optimizer.schedule=linear", "actor.optimizer.min_lr=1e-4"),
]
ONCE = ("generation", "scoring", "update", "tensors", "manifest", "rename", "between rename and pointer", "anywhere")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flows")
    config = write_config(root / "config.yaml", make_inputs(root / "inputs"))
    run_ranks(2, "tests.checkpoint.flows_worker", config, "undisturbed")
    for name, overrides in FLOWS.items():
        kill(config, [*SETTINGS, *overrides, f"name={name}-killed"], random.Random(name))
    run_ranks(2, "tests.checkpoint.flows_worker", config, "killed")
    return root


def kill(config: Path, overrides: list[str], chance: random.Random) -> None:
    """A rank, most often in the third iteration: there is something to go on from, and something is left to do."""
    function, rank, _, later = PLACES[chance.choice(ONCE)]
    seconds = round(chance.uniform(0.0, 0.2), 3) if later else 0
    status = start(config, overrides, (rank or chance.choice("01"), function, "3", str(seconds)))
    assert status != 0, f"it was not killed at the third call of {function}"


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_that_was_killed_goes_on_bit_for_bit(name: str, root: Path) -> None:
    undisturbed, killed = root / f"{name}-undisturbed", root / f"{name}-killed"
    expected = rows(undisturbed)
    assert rows(killed) == expected
    assert tensors(killed, NUM_ITERATIONS) == tensors(undisturbed, NUM_ITERATIONS)
    assert tensors(undisturbed, 2) != tensors(undisturbed, NUM_ITERATIONS), "it has learnt in between"
    assert len({row["actor/lr"] for row in expected}) == NUM_ITERATIONS, "the rate is another in each iteration"


def test_what_dynamic_sampling_went_on_from_had_a_surplus(root: Path) -> None:
    left = [float(row["rollout/groups_surplus"]) for row in rows(root / "dynamic_sampling-killed")]
    assert any(left[:3]), left


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["iteration"] for row in found] == [str(i) for i in range(1, NUM_ITERATIONS + 1)]
    return [{name: x for name, x in row.items() if not any(part in name for part in COSTS)} for row in found]


def tensors(run: Path, iteration: int) -> dict[str, object]:
    """Size and checksum of what all ranks have written."""
    files = read_manifest(run / "checkpoints" / step_name(iteration)).files
    return {name: its for name, its in files.items() if name.endswith((".distcp", "surplus.safetensors"))}
