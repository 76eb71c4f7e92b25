"""Whole runs through the names of tutorials: value by value those of the same experiment through its YAML."""

import csv
import json
import re
from pathlib import Path

import pytest
import yaml

from hybridflow.checkpoint.store import steps
from hybridflow.config import ExperimentConfig
from tests.distributed.front_worker import NUM_STEPS
from tests.distributed.test_determinism import MEASURED
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks
from tests.messages import like

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory) -> Path:
    """The run directory of the YAML config."""
    path = write_config(tmp_path_factory.mktemp("yaml") / "config.yaml", inputs)
    run_ranks(2, "hybridflow.train", path, f"num_iterations={NUM_STEPS}", "checkpoint.save_interval=1")
    return path.parent / "run"


@pytest.fixture(scope="module")
def out(inputs, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("front")
    run_ranks(2, "tests.distributed.front_worker", inputs, root)
    return root


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """metrics.csv without what measures the machine."""
    with (run_dir / "metrics.csv").open() as file:
        return [{name: x for name, x in row.items() if not MEASURED.fullmatch(name)} for row in csv.DictReader(file)]


def test_a_run_of_directories_is_the_yamls(reference, out) -> None:
    expected = metrics(reference)
    assert [row["iteration"] for row in expected] == ["1", "2", "3"]
    assert {"reward/score_mean", "actor/loss", "critic/grad_norm", "kl/reference_mean"} <= expected[0].keys()
    assert metrics(out / "directories") == expected
    assert (out / "directories" / "samples.jsonl").read_bytes() == (reference / "samples.jsonl").read_bytes()


def test_its_config_is_the_yamls(reference, out) -> None:
    tree = yaml.safe_load((reference / "config.yaml").read_text())
    expected = tree | {"output_dir": str(out), "name": "directories"}
    assert yaml.safe_load((out / "directories" / "config.yaml").read_text()) == expected


def test_a_run_of_models_in_memory_is_the_same(reference, out) -> None:
    """The weights are the first rank's: those of the second are zeros."""
    assert metrics(out / "objects")[:NUM_STEPS] == metrics(reference)


def test_what_was_written_of_models_in_memory_is_gone(out) -> None:
    record = json.loads((out / "record.json").read_text())
    assert record["left"] == ["directories", "objects"]
    config = ExperimentConfig.from_yaml(out / "objects" / "config.yaml")
    assert config.actor.model == str(out / ".objects.models" / "actor")
    assert not (out / ".objects.models").exists()
    assert {path.name for path in (out / "objects" / "hf").iterdir()} >= {"model.safetensors", "tokenizer.json"}


def test_a_checkpoint_of_its_own_is_gone_on_from(out) -> None:
    """In the same run directory: one more row, and no earlier run beside it."""
    rows = metrics(out / "objects")
    assert [row["iteration"] for row in rows] == ["1", "2", "3", "4"]
    assert not (out / "objects.1").exists()
    assert steps(out / "objects" / "checkpoints") == [3, 4]


def test_the_config_that_it_left_is_run_as_any(reference, out) -> None:
    """From the checkpoint after its second iteration on."""
    assert metrics(out / "fork") == metrics(reference)[2:]
    record = json.loads((out / "record.json").read_text())
    assert "it was built from a config, whose checkpoint.load says" in record["load by config"]
    assert record["directory by config"] == like(
        f"checkpoint_dir = {str(out / 'fork')!r}: set output_dir and name in the config"
    )


def test_models_in_memory_that_cannot_be_written_are_told(out) -> None:
    record = json.loads((out / "record.json").read_text())
    where = out / "file" / ".run.models" / "actor"
    assert record["no directory"].startswith(f"rank 0: {where}: the model in memory cannot be written: ")


def test_a_run_that_is_over_says_so(out) -> None:
    record = json.loads((out / "record.json").read_text())
    assert record["again"] == "fit: was called before; one call trains for all of num_steps"
    assert re.fullmatch(
        r"load_checkpoint\('.*'\): comes before fit, and its training is over", record["load after fit"]
    )
