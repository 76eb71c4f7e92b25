"""Another release of what is patched than the patches were written for is refused, and nothing is patched.

Unless HYBRIDFLOW_TRY_VERSIONS asks to try it.
"""

import platform
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import versions
from hybridflow.parallel.versions import SEEN, SETS, ReleaseSet, check_version, installed_set, public, set_line

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def each_warns_anew() -> None:
    versions._warn_of.cache_clear()


@pytest.mark.parametrize("known", SETS, ids=lambda known: known.name)
def test_a_set_has_the_exact_releases_that_pyproject_has_for_its_python(known: ReleaseSet) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["cuda" if "GPUs" in known.name else "cpu"]
    stated = [Requirement(text) for text in (*project["dependencies"], *extra)]
    here = [one for one in stated if one.marker is None or one.marker.evaluate({"python_version": known.python})]
    exact = {one.name: str(one.specifier) for one in here if str(one.specifier).startswith("==")}
    assert {name: f"=={version}" for name, version in known.releases.items()} == exact


def test_what_is_patched_may_be_of_any_set() -> None:
    assert SEEN == {"vllm": ("0.32.0",), "megatron-core": ("0.16.1", "0.19.2"), "torch": ("2.13.0",)}


def test_what_is_installed_here_is_a_set_and_its_releases_are_told() -> None:
    name, releases = installed_set()
    assert name == f"CPUs, Python {'.'.join(platform.python_version_tuple()[:2])}"
    assert f"torch {metadata.version('torch')}, megatron-core {metadata.version('megatron-core')}, " in releases
    assert set_line() == f"releases: {releases}: the set for {name}"


def pretend(monkeypatch: pytest.MonkeyPatch, python: str, found: Mapping[str, str]) -> None:
    monkeypatch.setattr(versions.platform, "python_version_tuple", lambda: tuple(python.split(".")))
    monkeypatch.setattr(versions.platform, "python_version", lambda: python)
    monkeypatch.setattr(versions, "distribution_version", found.get)


GPUS = {"torch": "2.13.0+cu130", "megatron-core": "0.19.2", "vllm": "0.32.0", "transformer-engine": "2.16.1"}


def test_releases_that_are_no_set_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.12.4", GPUS)
    told = "Python 3.12.4, torch 2.13.0+cu130, megatron-core 0.19.2, vllm 0.32.0, transformer-engine 2.16.1"
    assert installed_set() == ("GPUs, Python 3.12", told)
    for python, changed in (("3.11.9", {}), ("3.12.4", {"megatron-core": "0.16.1"}), ("3.12.4", {"torch": "2.14.0"})):
        pretend(monkeypatch, python, GPUS | changed)
        assert installed_set()[0] is None
        assert set_line().endswith(": no set that is known to go together")
    pretend(monkeypatch, "3.12.4", {name: version for name, version in GPUS.items() if name != "transformer-engine"})
    assert installed_set()[0] is None


def test_builds_of_a_release_are_alike() -> None:
    assert [public(version) for version in ("2.13.0+cpu", "2.13.0+cu130", "2.13.0", "2.14.0rc1")] == [
        *["2.13.0"] * 3,
        "2.14.0rc1",
    ]


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_a_build_of_the_same_release_passes(found: str) -> None:
    check_version("vllm", found)


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.32.0.dev3+g5df63a720", "0.32.0rc1", "dev"])
def test_another_release_is_named(found: str) -> None:
    with pytest.raises(EnvironmentProblem) as caught:
        check_version("vllm", found)
    assert str(caught.value) == (
        f"vllm {found} is installed, but hybridflow needs vllm 0.32.0, because it replaces private parts of that "
        "release. `bash launch/setup.sh` installs the right release, with --cuda for GPUs. "
        f"HYBRIDFLOW_TRY_VERSIONS=1 tries {found} all the same"
    )


@pytest.mark.parametrize("found", ["0.16.1", "0.19.2"])
def test_both_releases_of_megatron_pass(found: str) -> None:
    check_version("megatron-core", found)


def test_a_release_that_is_tried_is_warned_of_once_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HYBRIDFLOW_TRY_VERSIONS", "1")
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        check_version("vllm", "0.24.0")
        check_version("megatron-core", "0.18.0")
        check_version("torch", "2.13.0+cu130")
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "hybridflow: warning: HYBRIDFLOW_TRY_VERSIONS=1: vllm 0.24.0 is tried. hybridflow replaces private parts of "
        "vllm 0.32.0; with another release nothing is tested"
    )
    assert "megatron-core 0.18.0 is tried" in second and "megatron-core 0.16.1 or 0.19.2;" in second
    monkeypatch.setenv("RANK", "1")
    check_version("vllm", "0.25.0")
    assert capsys.readouterr().err == ""


def test_nothing_is_tried_unless_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_TRY_VERSIONS", "0")
    with pytest.raises(EnvironmentProblem, match=r"^vllm 0\.24\.0 is installed, but hybridflow needs vllm 0\.32\.0"):
        check_version("vllm", "0.24.0")
    monkeypatch.setenv("HYBRIDFLOW_TRY_VERSIONS", "yes")
    with pytest.raises(EnvironmentProblem, match=r"^HYBRIDFLOW_TRY_VERSIONS=yes: must be 0 or 1$"):
        check_version("vllm", "0.24.0")


@pytest.mark.parametrize("cuda", [False, True])
def test_another_megatron_is_refused_before_it_is_adapted(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core
    from megatron.core import parallel_state

    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    monkeypatch.setattr(platforms, "uses_cuda", lambda: cuda)
    monkeypatch.setattr(parallel_state, "torch", torch)  # as it is imported
    monkeypatch.setattr(torch.Tensor, "cuda", original := torch.Tensor.cpu)
    with pytest.raises(EnvironmentProblem, match=r"^megatron-core 0\.17\.0 is installed, .* 0\.16\.1 or 0\.19\.2, "):
        platforms.adapt_megatron()
    assert parallel_state.torch is torch and torch.Tensor.cuda is original
