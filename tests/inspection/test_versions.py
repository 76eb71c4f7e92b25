"""Releases that go together, packages that are missing, and the two packages called apex."""

import re
import sys
from pathlib import Path

import pytest

from hybridflow.inspection import versions
from hybridflow.inspection.versions import (
    apex_at,
    apex_finding,
    installed,
    pair_findings,
    version_findings,
)
from hybridflow.parallel.versions import SEEN, SETS, ReleaseSet, installed_set, public, release, within
from tests.constraints import CUDA, OVER, OWN, pinned

GOOD = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "vllm": "0.32.0",
    "transformers": "5.19.0",
    "transformer-engine": None,
    "flash-attn": None,
    "CUDA": None,
}
NEWER = {"megatron-core": "0.19.2"}


def of(findings, name):
    [found] = [finding for finding in findings if finding.name == name]
    return found


def test_releases_are_compared_by_their_numbers() -> None:
    assert [release(text) for text in ("2.13.0+cpu", "0.16.1rc2", "13", "none")] == [(2, 13, 0), (0, 16, 1), (13,), ()]
    assert [within(v, ((5, 16, 1), (5, 20))) for v in ("5.16.0", "5.16.1", "5.19.9", "5.20.0")] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("changed", "name", "status", "advice"),
    [
        ({}, "vllm with torch", "ok", ""),
        ({"torch": "2.14.0"}, "vllm with torch", "fail", "vllm 0.32.0 needs torch from 2.13 on, below 2.14"),
        ({"vllm": "0.24.0"}, "vllm with torch", "fail", "vllm 0.24.0 needs torch from 2.11 on, below 2.12"),
        ({"vllm": "0.24.0", "torch": "2.11.0+cu129"}, "vllm with torch", "ok", ""),
        ({"vllm": "0.33.0", "torch": "2.14.0"}, "vllm with torch", "ok", ""),
        ({"vllm": "0.50.0"}, "vllm with torch", "warn", "no release of torch is known to go with it"),
        ({"transformers": "5.20.0"}, "vllm with transformers", "fail", "from 5.16.1 on, below 5.20"),
        ({"transformer-engine": "2.11.0"}, "megatron-core with transformer-engine", "ok", ""),
        ({"transformer-engine": "2.12.0"}, "megatron-core with transformer-engine", "fail", "below 2.12"),
        ({**NEWER, "transformer-engine": "2.16.1"}, "megatron-core with transformer-engine", "ok", ""),
        ({**NEWER, "transformer-engine": "2.13.0"}, "megatron-core with transformer-engine", "fail", "from 2.14 on"),
        (
            {"transformer-engine": "2.16.1", "nvidia-cublas": "13.1.1.3"},
            "transformer-engine with nvidia-cublas",
            "fail",
            "transformer-engine 2.16.1 needs nvidia-cublas from 13.2.0.9 on, below 14.0: bash launch/setup.sh",
        ),
        (
            {"transformer-engine": "2.16.1", "nvidia-cublas": "13.2.0.9"},
            "transformer-engine with nvidia-cublas",
            "ok",
            "",
        ),
        ({"CUDA": "12.9"}, "torch with CUDA", "fail", "torch 2.13.0+cpu needs CUDA from 13.0 on, below 14.0"),
        ({"CUDA": "13.0"}, "torch with CUDA", "ok", ""),
    ],
)
def test_pairs(changed: dict, name: str, status: str, advice: str) -> None:
    found = of(pair_findings(GOOD | changed, "here"), name)
    assert found.status == status
    assert advice in found.advice and bool(advice) == bool(found.advice)


def test_a_pair_is_not_looked_at_where_one_is_missing() -> None:
    names = [finding.name for finding in pair_findings(GOOD, "here")]
    assert names == ["vllm with torch", "vllm with transformers"]


@pytest.mark.parametrize("known", SETS, ids=lambda known: known.name)
def test_the_releases_of_a_set_go_together(known: ReleaseSet) -> None:
    on_gpus = "vllm" in known.releases
    found = pinned(CUDA) | pinned(OVER) if on_gpus else pinned(OWN, known.python)
    found |= {"vllm": "0.32.0", "CUDA": "13.0" if on_gpus else None}
    assert {name: found[name] for name in known.releases} == known.releases
    told = pair_findings(found, "here")
    assert [finding.status for finding in told] == ["ok"] * (5 if on_gpus else 2)


@pytest.mark.parametrize(
    ("changed", "cuda", "name", "status", "advice"),
    [
        ({"torch": "2.12.1"}, False, "torch", "fail", "replaces private parts of torch 2.13.0, and refuses any other"),
        ({"megatron-core": "0.17.0"}, False, "megatron-core", "fail", "megatron-core 0.16.1 or 0.19.2, and"),
        (NEWER, False, "megatron-core", "ok", ""),
        ({"vllm": None}, False, "vllm", "fail", "bash launch/setup.sh"),
        ({"transformers": None}, False, "transformers", "fail", "bash launch/setup.sh"),
        ({}, False, "transformer-engine", "ok", ""),
        ({}, True, "transformer-engine", "warn", "layers run unfused without it"),
        ({}, True, "flash-attn", "ok", ""),
    ],
)
def test_packages(changed: dict, cuda: bool, name: str, status: str, advice: str) -> None:
    found = of(version_findings(GOOD | changed, "here", cuda=cuda), name)
    assert found.status == status
    assert advice in found.advice


def test_a_release_that_is_tried_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_TRY_VERSIONS", "1")
    found = of(version_findings(GOOD | {"vllm": "0.24.0"}, "here", cuda=False), "vllm")
    assert (found.status, found.value) == ("warn", "0.24.0")
    assert found.advice.endswith("of vllm 0.32.0; HYBRIDFLOW_TRY_VERSIONS=1 tries this one")


def test_the_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = of(version_findings(GOOD, "here", cuda=False), "set")
    assert (found.status, found.value) == ("ok", f"for {installed_set()[0]}")
    monkeypatch.setattr(versions, "installed_set", lambda: (None, "Python 3.12.4, torch 2.14.0"))
    found = of(version_findings(GOOD, "here", cuda=False), "set")
    assert (found.status, found.value) == ("warn", "none that is known: Python 3.12.4, torch 2.14.0")


def test_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.platform, "python_version_tuple", lambda: ("3", "13", "1"))
    found = of(version_findings(GOOD, "here", cuda=False), "Python")
    assert (found.status, found.advice[:35]) == ("fail", "hybridflow needs Python 3.11 or 3.1")


def test_what_is_installed_here_is_found_without_importing_it() -> None:
    found = installed()
    assert [public(found[package]) in SEEN[package] for package in SEEN] == [True] * 3
    source = Path(versions.__file__).read_text()
    assert not re.search(r"^\s*(import|from) (vllm|megatron|transformer_engine|apex|flash_attn)", source, re.MULTILINE)


# ------------------------------------------------------------------------------------------------ apex


def make(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


NVIDIA = ("apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "apex/normalization/__init__.py")
BUILT = ("amp_C.cpython-311-x86_64-linux-gnu.so", "fused_weight_gradient_mlp_cuda.cpython-311-x86_64-linux-gnu.so")
PYPI = ("apex/__init__.py", "apex/lib/flash.py", "apex/models.py", "apex/templates/login.mako", "apex/views.py")


def test_apex_is_told_by_what_it_holds(tmp_path: Path) -> None:
    built, bare, other = (tmp_path / name for name in ("built", "bare", "other"))
    make(built, *NVIDIA, *BUILT), make(bare, *NVIDIA), make(other, *PYPI)
    assert apex_at(None, None) == "absent"
    assert apex_at(built / "apex", built) == "NVIDIA's"
    assert apex_at(bare / "apex", None) == "NVIDIA's, without its CUDA extensions"
    assert apex_at(other / "apex", other) == "not NVIDIA's"
    (built / BUILT[1]).unlink()
    assert apex_at(built / "apex", built) == "NVIDIA's, without its CUDA extensions"


def test_an_apex_on_the_path_is_looked_at_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, *PYPI)
    (tmp_path / "apex/__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    found = of(version_findings(GOOD, "here", cuda=False), "apex")
    assert (found.status, found.value) == ("warn", f"not NVIDIA's: {tmp_path}/apex has no multi_tensor_apply")
    assert found.advice.startswith("pip uninstall apex; NVIDIA's is on no package index")
    assert "apex" not in sys.modules


def test_a_built_apex_on_the_path_is_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, *NVIDIA, "fused_weight_gradient_mlp_cuda.so", "amp_C.so")
    monkeypatch.syspath_prepend(tmp_path)
    found = of(version_findings(GOOD, "here", cuda=True), "apex")
    assert (found.status, found.value) == ("ok", "NVIDIA's")


def test_apex_without_its_extensions_matters_on_gpus() -> None:
    kind = "NVIDIA's, without its CUDA extensions"
    assert apex_finding(kind, Path("apex"), "here", cuda=False).status == "ok"
    found = apex_finding(kind, Path("apex"), "here", cuda=True)
    assert found.status == "warn" and "--cuda_ext" in found.advice


# ------------------------------------------------------------------------------------------------ the driver


@pytest.mark.parametrize(
    ("script", "status", "value"),
    [
        ("echo 580.95.05; echo 580.95.05", "ok", "580.95.05"),
        ("exit 9", "warn", "nvidia-smi: Command"),
        ("sleep 5", "warn", "timed out after 0.2 seconds"),
        (None, "warn", "nvidia-smi is not there"),
    ],
)
def test_the_driver(
    script: str | None, status: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setattr(versions, "NVIDIA_SMI", (str(program),))
    monkeypatch.setattr(versions, "NVIDIA_SMI_SECONDS", 0.2 if script == "sleep 5" else 15)
    found = versions._driver("here")
    assert found.status == status
    assert value in found.value
