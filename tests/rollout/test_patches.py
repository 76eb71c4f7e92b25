"""vLLM is patched only where it is the release that the patches were written for, built for the trainer's device."""

import pytest
import vllm

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.versions import SEEN
from hybridflow.rollout import patches


@pytest.fixture(autouse=True)
def no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch() -> None:
        raise AssertionError("patched")

    monkeypatch.setattr(patches, "_patch_once", patch)


def test_another_release_is_refused_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(EnvironmentProblem, match=r"^vllm 0\.33\.0 is installed, hybridflow needs vllm 0\.32\.0"):
        patches.prepare_vllm()


def test_the_loader_refuses_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridflow.rollout.loader import AliasLoader

    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(EnvironmentProblem, match=r"^vllm 0\.31\.0 is installed, hybridflow needs vllm 0\.32\.0"):
        AliasLoader(None)


def test_a_build_for_another_device_is_refused_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "uses_cuda", lambda: True)
    with pytest.raises(EnvironmentProblem) as caught:
        patches.prepare_vllm()
    assert str(caught.value).startswith("this vLLM is built for cpu, the trainer computes on CUDA: set `platform`")
    assert f"`pip install vllm=={SEEN['vllm']}`" in str(caught.value)


def test_the_right_one_is_patched() -> None:
    with pytest.raises(AssertionError, match="patched"):
        patches.prepare_vllm()
