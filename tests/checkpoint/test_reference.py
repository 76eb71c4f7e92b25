"""A reference that becomes the actor every so many iterations, under ReMax: a run with it goes on as if not ended."""

import shutil
from pathlib import Path

import pytest

from hybridflow.checkpoint.store import step_name
from hybridflow.config import ExperimentConfig
from hybridflow.placement.placed import place
from hybridflow.placement.saving import written_bytes
from tests.checkpoint.kills import rows
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

SETTINGS = ["num_iterations=4", "checkpoint.keep_last=9", "checkpoint.save_interval=3"]
SETTINGS += ["reference.tensor_parallel_size=2", "critic=null", "sampling.samples_per_prompt=2"]
SETTINGS += ["algorithm={name: remax, kl: {controller: adaptive, reset_reference_interval: 2}}"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs, and the same after iteration 3, gone on with."""
    root = tmp_path_factory.mktemp("reference")
    write_config(root / "config.yaml", make_inputs(root / "inputs"))
    train(root, "undisturbed")
    shutil.copytree(root / "undisturbed", root / "again")
    shutil.rmtree(root / "again" / "checkpoints" / step_name(4))
    train(root, "again")
    return root


def train(root: Path, name: str) -> None:
    run_ranks(2, "hybridflow.train", root / "config.yaml", *SETTINGS, f"name={name}")


def test_after_a_reset_there_is_no_kl_until_the_next_step(root: Path) -> None:
    """In the iteration after it the actor is the reference, up to the rounding of weights at other addresses."""
    kl = [float(row["kl/reference_mean"]) for row in rows(root / "undisturbed")]
    assert len(kl) == 4 and min(kl[:2]) > 1 and abs(kl[2]) < 1e-5 and 1e-4 < abs(kl[3]) < 0.5


def test_the_run_goes_on_with_the_reference_that_it_had(root: Path) -> None:
    assert "reward/greedy_score_mean" in rows(root / "again")[0]
    assert rows(root / "again") == rows(root / "undisturbed")


def test_the_plan_counts_what_a_checkpoint_holds_of_it(root: Path) -> None:
    config = ExperimentConfig.from_yaml(root / "config.yaml", SETTINGS)
    files = (root / "undisturbed" / "checkpoints" / step_name(3) / "reference").glob("*.distcp")
    size, planned = (
        sum(file.stat().st_size for file in files),
        written_bytes(place(config, 2).models["reference"], bucket_bytes=None),
    )
    assert sum(planned.values()) > 100_000
    assert 0 <= size - sum(planned.values()) < 100_000  # what describes each tensor
