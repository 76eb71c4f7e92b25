"""HYBRIDFLOW_TRY_VERSIONS=1 with releases before those that hybridflow is written for: what lacks a name still runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import ROOT, of_no_rank

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]


def trained(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    config = json.loads(write_config(folder / "config.yaml", make_inputs(folder / "inputs")).read_text())
    config["actor"]["tensor_parallel_size"], config["num_iterations"] = 1, 1
    (folder / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "tests.rollout.older_worker", folder / "config.yaml", folder / "seen.json"]
    env = of_no_rank(HYBRIDFLOW_PLATFORM="cpu", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), **variables)
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_a_loader_without_create_model_is_tried(tmp_path: Path) -> None:
    """As vLLM 0.24.0 has it; its own release and that of torch 2.11 are named, once each."""
    done = trained(tmp_path, HYBRIDFLOW_TRY_VERSIONS="1")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "seen.json").read_text())["hand_offs"] == 1
    warned = [line for line in done.stderr.splitlines() if "HYBRIDFLOW_TRY_VERSIONS" in line]
    assert sorted(line.split(": ")[3].partition(" is tried")[0] for line in warned) == [
        "torch 2.11.0+cpu",
        "vllm 0.24.0",
    ]


def test_they_are_refused_otherwise(tmp_path: Path) -> None:
    done = trained(tmp_path)
    assert done.returncode == 1
    assert "torch 2.11.0+cpu is installed, but hybridflow needs torch 2.13.0" in done.stderr
