"""What of two runs is compared, and how a difference is told: directories by hand, without a run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.config.kinds import load_config
from hybridflow.config.world_size import smallest_world_size
from tests.bench.same_runs import HERE, MODELS, RunFailed, cases, contents, differences


def write_run(directory: Path, *, rate: str = "0.1", seconds: str = "1.0", last: float = 3.0) -> Path:
    for part in ("batches", "hf"):
        (directory / part).mkdir(parents=True)
    rows = f"iteration,time/update_seconds,actor/lr\n1,{seconds},0.1\n2,{seconds},{rate}\n"
    (directory / "metrics.csv").write_text(rows)
    save_file({"input_ids": torch.arange(3)}, directory / "batches" / "iteration_000001.safetensors")
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, last])}
    save_file(weights, directory / "hf" / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_equal_runs_differ_in_nothing_but_costs(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "first"), write_run(tmp_path / "other", seconds="2.0")
    assert differences(contents(first), contents(other)) == []
    assert {kind: len(values) for kind, values in contents(first).items()} == {"metrics": 4, "batches": 1, "weights": 2}


def test_a_difference_is_named_with_both_values(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "first"), write_run(tmp_path / "other", rate="0.2", last=3.0000002)
    metric, weight = differences(contents(first), contents(other))
    assert metric == "metrics: iteration 2, actor/lr: before 0.1, now 0.2"
    assert weight.startswith("weights: hf: b: before F32 [2] ")


def test_what_one_run_alone_has_is_a_difference(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "first"), write_run(tmp_path / "other")
    save_file({"x": torch.zeros(1)}, other / "batches" / "iteration_000002.safetensors")
    (line,) = differences(contents(first), contents(other))
    assert line.startswith("batches: iteration_000002, x: before nothing, now F32 [1] ")


def test_a_run_without_weights_is_no_proof(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "hf" / "model.safetensors").unlink()
    with pytest.raises(RunFailed, match="no weights"):
        contents(directory)


def test_every_quickstart_is_a_case_that_loads_and_whose_model_can_be_made() -> None:
    found = cases(whole=False)
    assert {path.stem for path in (HERE / "configs").glob("quickstart*.yaml")} < set(found)
    for case in found.values():
        config = load_config(HERE / case.config, case.overrides)
        assert config.num_iterations == 3 and smallest_world_size(config) in (2, 3, 8)
        assert any(f"data/{name}/" in config.to_yaml() for name in MODELS)
