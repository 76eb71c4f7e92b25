"""Which packages an import that fails is laid to: with distributions that are made here, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.inspection import imports
from hybridflow.inspection.imports import IMPORTS, Owners
from tests.launch import of_no_rank


def install(site: Path, name: str, version: str, **files: str) -> None:
    """A distribution with these files, whose names have _ for a directory's /. Its RECORD has a hash by content."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    record = []
    for key, text in files.items():
        path = site / f"{key.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        record.append(f"{path.relative_to(site)},sha256={abs(hash(text))},{len(text)}\n")
    (info / "RECORD").write_text("".join(record))


def said(site: Path, *names: str) -> list[str]:
    """By the process that launch/setup.sh starts; every import of a run but those of `site` fails there."""
    command = [sys.executable, "-P", imports.__file__, *names]
    done = subprocess.run(
        command, env=of_no_rank(PYTHONPATH=str(site)), cwd=site, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert done.returncode == int("fails" in done.stdout), done.stderr
    return lines


def test_a_symbol_that_a_library_has_not(tmp_path: Path) -> None:
    library = tmp_path / "transformer_engine" / "lib.py"
    install(tmp_path, "nvidia-cublas", "13.1.1.3")
    install(tmp_path, "transformer-engine-cu13", "2.16.1", transformer_engine__lib="")
    library.rename(library.with_name("libtransformer_engine.so"))
    library = library.with_name("libtransformer_engine.so")
    record = next(tmp_path.glob("transformer_engine_cu13*")) / "RECORD"
    record.write_text(record.read_text().replace("lib.py", "libtransformer_engine.so"))
    fault = f"{library}: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"
    install(tmp_path, "transformer-engine", "2.16.1", transformer_engine__pytorch=f"raise OSError({fault!r})\n")
    assert said(tmp_path, "transformer_engine") == [
        f"transformer_engine: fails: OSError: {fault}",
        "    transformer-engine-cu13 2.16.1 and nvidia-cublas 13.1.1.3 do not fit: libtransformer_engine.so asks for "
        "cublasLtGroupedMatrixLayoutInit_internal",
    ]


def test_a_file_of_two_packages(tmp_path: Path) -> None:
    """The one that was installed last has it; the other's users fail."""
    install(tmp_path, "cuda-bindings", "13.5.0", bindings__runtime="cudaLibrary_t = 1\n")
    install(tmp_path, "cuda-python", "12.6.2", bindings__runtime="cudaStream_t = 1\n")
    install(tmp_path, "flashinfer-python", "0.7.0", flashinfer="import bindings.runtime as r\nr.cudaLibrary_t\n")
    file = tmp_path / "bindings" / "runtime.py"
    assert said(tmp_path, "flashinfer") == [
        "flashinfer: fails: AttributeError: module 'bindings.runtime' has no attribute 'cudaLibrary_t'",
        "    flashinfer-python 0.7.0 and cuda-bindings 13.5.0, cuda-python 12.6.2 do not fit: "
        "module 'bindings.runtime' has no attribute 'cudaLibrary_t'",
        f"    cuda-bindings 13.5.0, cuda-python 12.6.2 own the same file, with other contents: {file}",
    ]


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    install(tmp_path, "flashinfer-python", "0.7.0", flashinfer="import tvm_ffi_of_nobody\n")
    assert said(tmp_path, "flashinfer") == [
        "flashinfer: fails: ModuleNotFoundError: No module named 'tvm_ffi_of_nobody'",
        "    flashinfer-python 0.7.0 does not import: No module named 'tvm_ffi_of_nobody', which is not installed",
    ]


def test_a_package_built_for_another_torch(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0", torchvision="raise RuntimeError('operator a::nms does not exist')\n")
    install(tmp_path, "transformers", "5.19.0", transformers="import torchvision\n")
    assert said(tmp_path, "transformers") == [
        "transformers: fails: RuntimeError: operator a::nms does not exist",
        "    torchvision 0.28.0 and torch 2.13.0+cpu do not fit: operator a::nms does not exist",
    ]


def test_the_first_that_fails_ends_it_and_what_a_run_can_go_without_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class version: cuda = None\nclass cuda:\n  device_count = staticmethod(int)\n")
    (tmp_path / "transformers.py").write_text("LlamaForCausalLM = 1\n")
    (tmp_path / "megatron.py").write_text("raise ValueError('one\\ntwo')\n")
    assert said(tmp_path)[:4] == [
        "torch: ok, CUDA none 0 devices",
        "transformers: ok",
        "transformer_engine: not installed; a run goes without",
        "megatron.core: fails: ValueError: one two",
    ]


def test_files_of_equal_content_are_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "one", "1", shared__licence="same")
    install(tmp_path, "two", "1", shared__licence="same")
    install(tmp_path, "three", "1", other="a")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    owners = Owners()
    assert owners.distributions_of(str(tmp_path / "shared" / "licence.py")) == ["one", "two"]
    assert owners.of_one_file() == []
    install(tmp_path, "four", "1", other="b")
    assert Owners().of_one_file() == [(("four", "three"), str(tmp_path / "other.py"))]
    assert Owners().of_one_file(["one"]) == []


def test_the_order_is_that_of_a_run() -> None:
    assert list(IMPORTS) == ["torch", "transformers", "transformer_engine", "megatron.core", "flashinfer", "vllm"]
