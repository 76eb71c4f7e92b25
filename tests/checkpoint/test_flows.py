"""Every flow goes on from a checkpoint as if it had not ended: every metric that is no time or memory, every weight."""

import csv
from pathlib import Path

import pytest

from hybridflow.checkpoint.store import read_manifest, step_name
from tests.checkpoint.test_kills import COSTS
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.flows.flows_worker import CRITIC_FREE, critic_free
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 4
SETTINGS = [f"num_iterations={NUM_ITERATIONS}", "checkpoint.save_interval=2", "checkpoint.keep_last=9"]
FLOWS = {
    **{name: critic_free(name, *absent) for name, absent in CRITIC_FREE.items()},
    "reinforce_group": [*critic_free("reinforce"), "algorithm.baseline=group"],
    "weights": [*critic_free("grpo"), "algorithm.policy.importance={kind: icepop}"],
    "vapo": [
        "algorithm={name: ppo, value_gae_lambda: 1.0, length_adaptive_alpha: 0.2, positive_nll_coef: 0.1}",
        "reward.normalization=running",
    ],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flows")
    run_ranks(2, "tests.checkpoint.flows_worker", write_config(root / "config.yaml", make_inputs(root / "inputs")))
    return root


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_goes_on_bit_for_bit(name: str, root: Path) -> None:
    undisturbed, again = root / f"{name}-undisturbed", root / f"{name}-again"
    assert rows(again) == rows(undisturbed)
    assert tensors(again, NUM_ITERATIONS) == tensors(undisturbed, NUM_ITERATIONS)
    assert tensors(undisturbed, 2) != tensors(undisturbed, NUM_ITERATIONS), "it has learnt in between"


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["iteration"] for row in found] == [str(i) for i in range(1, NUM_ITERATIONS + 1)]
    return [{name: x for name, x in row.items() if not any(part in name for part in COSTS)} for row in found]


def tensors(run: Path, iteration: int) -> dict[str, object]:
    """Size and checksum of what all ranks have written."""
    files = read_manifest(run / "checkpoints" / step_name(iteration)).files
    return {name: its for name, its in files.items() if name.endswith(".distcp")}
