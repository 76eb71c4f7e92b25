"""A run is saved by the time that has passed, on rank 0's clock alone."""

import csv
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("minutes")
    return write_config(root / "config.yaml", make_inputs(root / "inputs"))


def saved(config: Path, name: str, *overrides: str) -> tuple[list[str], str]:
    """The checkpoints of a run of three iterations, and what it has said."""
    out = config.parent / "runs"
    more = ["num_iterations=3", "checkpoint.keep_last=9", f"name={name}", f"output_dir={out}", *overrides]
    done = run_ranks(2, "tests.checkpoint.minutes_worker", config, *more)
    return sorted(path.name for path in (out / name).glob("checkpoints/step_*")), done.stdout


def rows(config: Path, name: str) -> list[list[str]]:
    with (config.parent / "runs" / name / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.distributed
def test_after_so_many_minutes_each_iteration_is_late(config: Path) -> None:
    found, said = saved(config, "often", "checkpoint.save_minutes=0.00001")
    assert found == ["step_000001", "step_000002", "step_000003"]
    assert "saves every 1e-05 minutes (checkpoint.save_minutes)" in said


@pytest.mark.distributed
def test_by_default_a_short_run_is_saved_at_its_end_alone_and_a_longer_one_continues(config: Path) -> None:
    """Whatever the clock of another rank says."""
    found, said = saved(config, "short")
    assert found == ["step_000003"] and "saves every 30 minutes (checkpoint.save_minutes)" in said
    before = rows(config, "short")
    found, said = saved(config, "short", "num_iterations=5")
    assert found == ["step_000003", "step_000005"] and "step_000003, after iteration 3" in said
    after = rows(config, "short")
    assert [row[0] for row in after[1:]] == ["1", "2", "3", "4", "5"]
    assert [row[: len(before[0])] for row in after[:4]] == before
    assert not (config.parent / "runs" / "short.1").exists()


@pytest.mark.distributed
@pytest.mark.thorough
def test_beside_the_number_of_iterations_and_not_at_all(config: Path) -> None:
    assert saved(config, "both", "checkpoint.save_interval=2")[0] == ["step_000002", "step_000003"]
    found, said = saved(config, "never", "checkpoint.save_minutes=null")
    assert found == [] and "saves every" not in said


@pytest.mark.distributed
@pytest.mark.thorough
def test_rollouts_alone_are_not_saved(config: Path) -> None:
    assert saved(config, "alone", "--rollout-only")[0] == []
    assert not list((config.parent / "runs" / "alone-rollout").glob("checkpoints/step_*"))
