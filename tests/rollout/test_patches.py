"""vLLM is patched only where it is the release that the patches were written for, built for the trainer's device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.versions import SEEN
from hybridflow.rollout import device, patches
from hybridflow.rollout.device import set_environment


@pytest.fixture(autouse=True)
def no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch() -> None:
        raise AssertionError("patched")

    monkeypatch.setattr(patches, "_patch_once", patch)


def test_another_release_is_refused_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(EnvironmentProblem, match=r"^vllm 0\.33\.0 is installed, but hybridflow needs vllm 0\.32\.0"):
        patches.prepare_vllm()


def test_the_loader_refuses_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridflow.rollout.loader import AliasLoader

    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    with pytest.raises(EnvironmentProblem, match=r"^vllm 0\.31\.0 is installed, but hybridflow needs vllm 0\.32\.0"):
        AliasLoader(None)


def test_a_build_for_another_device_is_refused_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "uses_cuda", lambda: True)
    with pytest.raises(EnvironmentProblem) as caught:
        patches.prepare_vllm()
    assert str(caught.value).startswith("this vLLM is built for cpu, but the trainer computes on CUDA. Set `platform`")
    assert f"`pip install vllm=={SEEN['vllm'][0]}`" in str(caught.value)


def test_the_right_one_is_patched() -> None:
    with pytest.raises(AssertionError, match="patched"):
        patches.prepare_vllm()


def test_kernels_without_gradients_are_refused_before_anything_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(
        EnvironmentProblem, match=r"^VLLM_BATCH_INVARIANT is set: .* the trainer in this process\. Unset the variable"
    ):
        patches.prepare_vllm()


def test_no_engine_on_gpus_needs_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks when it builds a sampler, of both model runners. Its own default imports FlashInfer."""
    from vllm import envs
    from vllm.v1.sample.ops import topk_topp_sampler

    class Cuda:
        @staticmethod
        def is_cuda() -> bool:
            return True

    monkeypatch.setattr(topk_topp_sampler, "current_platform", Cuda)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as where it is not installed
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    envs.disable_envs_cache()
    with pytest.raises(ImportError, match="flashinfer"):
        topk_topp_sampler.flashinfer_sampler_supported()
    monkeypatch.delenv("VLLM_ALLREDUCE_USE_FLASHINFER", raising=False)
    assert envs.VLLM_ALLREDUCE_USE_FLASHINFER
    set_environment()
    assert topk_topp_sampler.flashinfer_sampler_supported() is False and not envs.VLLM_ALLREDUCE_USE_FLASHINFER
    monkeypatch.setenv("VLLM_ALLREDUCE_USE_FLASHINFER", "1")  # who wants to try it may
    set_environment()
    assert envs.VLLM_ALLREDUCE_USE_FLASHINFER


def test_a_service_of_kubernetes_called_vllm_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ValueError, match="appears to be a URI"):
        envs.get_vllm_port()
    set_environment()
    assert envs.get_vllm_port() is None
    monkeypatch.setenv("VLLM_PORT", "8000")
    set_environment()
    assert envs.get_vllm_port() == 8000


REPLACED = """
import torch
library = torch.library.Library("aten", "IMPL")
library.impl("aten::linear", lambda x, weight, bias=None: torch.mm(x, weight.t()), "CPU")
weight = torch.ones(3, 4, requires_grad=True)
torch.nn.functional.linear(torch.ones(2, 4), weight).sum().backward()
"""


def test_what_vllm_replaces_for_batch_invariance_has_no_gradient() -> None:
    """aten::linear, as its enable_batch_invariant_mode does, here on a CPU: why we refuse that."""
    source = find_spec("vllm.model_executor.determinism.batch_invariant").origin
    assert '.impl("aten::linear", linear_batch_invariant, key)' in Path(source).read_text()
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "Could not run 'aten::linear_backward'" in done.stderr


def test_the_search_for_peers_that_needs_a_world_group_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", "0")
    with pytest.raises(AssertionError, match="patched"):
        patches.prepare_vllm()
    assert os.environ["VLLM_SKIP_P2P_CHECK"] == "1" and vllm.envs.VLLM_SKIP_P2P_CHECK


@pytest.mark.parametrize("cuda", [True, False])
def test_on_cuda_the_stream_is_vllms_before_any_model_is_built(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    from vllm.utils import torch_utils

    asked: list[bool] = []
    monkeypatch.setattr(torch_utils, "current_stream", lambda: asked.append(True))
    monkeypatch.setattr(device, "uses_cuda", lambda: cuda)
    monkeypatch.setattr(patches, "_check_platform", lambda device: None)
    monkeypatch.setattr(patches, "_patch_once", lambda: None)
    patches.prepare_vllm()
    assert asked == [True] * cuda
