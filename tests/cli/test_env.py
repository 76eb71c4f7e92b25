"""What `hybridflow env` tells of an environment, also of one where a package does not import."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from hybridflow import __version__
from hybridflow.cli import env
from hybridflow.cli.env import advice, verdict
from hybridflow.inspection.imports import IMPORTS
from hybridflow.parallel.versions import installed_set
from tests.constraints import OVER, pinned
from tests.launch import ROOT, of_no_rank


def test_torchs_companions_for_cuda_are_removed_by_the_command_that_is_told() -> None:
    found = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.14.1"}
    assert advice(found)[-1] == "    pip uninstall --yes torchvision torchaudio torchcodec"
    assert advice(found | {"torchvision": "0.28.0+cpu"})[-1] == "    pip uninstall --yes torchaudio torchcodec"


@pytest.mark.parametrize("torch_here", ["2.13.0", "2.13.0+cu130"])
def test_with_cuda_they_stay(torch_here: str) -> None:
    assert advice({"torch": torch_here, "torchvision": "0.28.0"}) == []
    assert advice({"torch": "2.13.0+cpu"}) == []


def test_a_cublas_of_torchs_beside_transformer_engine_is_replaced_by_the_command_that_is_told() -> None:
    [(package, least)] = pinned(OVER).items()
    assert package == "nvidia-cublas"
    found = {"torch": "2.13.0+cu130", "transformer-engine": "2.16.1", "nvidia-cublas": "13.1.1.3"}
    assert advice(found)[-1] == f"    pip install --no-deps nvidia-cublas=={least}"
    assert advice(found | {"nvidia-cublas": least}) == advice(found | {"transformer-engine": "2.12.0"}) == []


def test_an_environment_that_is_right_is_told_so() -> None:
    assert verdict([]) == "\nready: everything imports"


def test_a_collection_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "COLLECT_SECONDS", 0.01)
    assert env._collected().endswith("collect_env.py']' timed out after 0.01 seconds")


@pytest.mark.slow
def test_a_package_that_does_not_import_is_named_and_secrets_are_not_told(tmp_path: Path) -> None:
    for name in ("transformers", "megatron"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (tmp_path / "vllm.py").write_text("import os; os._exit(7)\n")
    (tmp_path / "pip.py").write_text("raise SystemExit('no pip here')\n")
    path = str(tmp_path / "pip.py")
    env = of_no_rank(
        PYTHONPATH=f"{tmp_path}:{ROOT}", HF_TOKEN="hf_abc", NCCL_DEBUG="INFO", OTHER="of nobody", CUDNN_LIBRARY=path
    )
    command = [sys.executable, "-m", "hybridflow", "env"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"hybridflow {__version__}")
    assert {f"    torch {metadata.version('torch')}", "    HF_TOKEN (set)", "    NCCL_DEBUG INFO"} <= set(lines)
    assert "hf_abc" not in done.stdout and "OTHER" not in done.stdout and path not in done.stdout
    assert {"torch.utils.collect_env", f"    PyTorch version: {torch.__version__}", "    CPU:"} <= set(lines)
    assert "    [pip3] Could not collect" in lines
    assert lines[-2:] == ["", "not ready: transformers, megatron.core, vllm cannot be imported"]
    lines = lines[:-2]
    assert [line.partition(":")[0].strip() for line in lines[-6:]] == list(IMPORTS)
    assert lines[-6].startswith(
        f"    torch: ok, CUDA {torch.version.cuda or 'none'} {torch.cuda.device_count()} devices"
    )
    assert lines[2] == f"releases: the set for {installed_set()[0]}"
    assert lines[-5] == "    transformers: fails: RuntimeError: operator torchvision::nms does not exist"
    assert lines[-1] == "    vllm: fails with status 7: no word"


def test_a_checkout_that_is_not_installed_tells_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = env._packages()

    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(env.metadata, "requires", not_installed)
    assert env._packages() == installed and installed["torch"] == metadata.version("torch")
