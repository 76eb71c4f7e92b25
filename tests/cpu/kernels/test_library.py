"""Where the kernels come from, and what stands where they cannot be had."""

import ctypes
import os
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.cpu.kernels import library as libraries
from hybridflow.cpu.kernels import matrix
from hybridflow.errors import EnvironmentProblem
from hybridflow.models.attention import PackedSequences, attention_by_length
from hybridflow.models.layer_classes import attention_functions
from hybridflow.parallel import platform as platforms
from tests.cpu.kernels.modes import has_wide_vectors

pytestmark = pytest.mark.compiles
NEEDED = pytest.mark.usefixtures("needs_kernels")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has not looked for kernels, with a home of its own."""
    monkeypatch.setattr(libraries, "_given_up", [])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    libraries._found.cache_clear()
    yield tmp_path
    libraries._found.cache_clear()


@pytest.fixture(scope="session")
def made(needs_kernels: None) -> Path:
    """The kernels of this process, as they were compiled before any test."""
    return Path(libraries.library()._name)


@pytest.fixture
def quick(fresh: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that has the kernels ready: what is tested is not what it compiles."""
    copies = 'for x; do [ "$last" = -o ] && cp {made} "$x"; last=$x; done'
    directory = fresh / "bin"
    directory.mkdir()
    compiler = program(directory / "cc", f'[ "$1" = --version ] && exit 0\n{copies.format(made=made)}')
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return compiler


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def computes_as_torch() -> bool:
    """In float32, bit for bit: so it was torch."""
    packed = PackedSequences.from_lengths((20, 7), torch.device("cpu"))
    qkv = torch.randn(3, 27, 2, 16, generator=torch.Generator().manual_seed(0))
    ours = attention_functions(torch.float32).attend(*qkv, packed=packed, scale=0.3)
    return torch.equal(ours, attention_by_length(*qkv, packed=packed, scale=0.3))


@pytest.mark.thorough
@NEEDED
def test_it_is_compiled_once_and_kept(fresh: Path) -> None:
    assert libraries.library() is not None and libraries.why_not() is None
    (made,) = (fresh / "home" / ".cache" / "hybridflow").glob("*.so")
    before = made.stat().st_mtime_ns
    libraries._found.cache_clear()
    assert libraries.library() is not None
    assert made.stat().st_mtime_ns == before
    assert not list(made.parent.glob("*.part"))


@NEEDED
def test_many_come_at_once_and_one_compiles(tmp_path: Path, quick: Path) -> None:
    calls = tmp_path / "calls"
    counting = program(tmp_path / "counting-cc", f'[ "$1" = --version ] || echo compiled >> {calls}\nexec {quick} "$@"')
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: libraries.compiled(str(counting), tmp_path), range(4)))
    assert len(made) == 1 and ctypes.CDLL(str(*made)).hybridflow_attention
    assert calls.read_text() == "compiled\n"


@NEEDED
def test_another_compiler_or_flag_is_another_file(tmp_path: Path, quick: Path) -> None:
    own = program(tmp_path / "cc", f'[ "$1" = --version ] && echo "another 1.0" || exec {quick} "$@"')
    files = [libraries.compiled(str(quick), tmp_path), libraries.compiled(str(own), tmp_path)]
    files.append(libraries.compiled(str(quick), tmp_path, ["-mno-avx512f"]))
    assert len({*files}) == 3


def test_without_a_compiler_torch_computes(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    assert libraries.library() is None
    assert libraries.why_not() == "there is no C compiler (cc, gcc, clang)"
    assert computes_as_torch()


def test_a_compiler_that_fails_says_why(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line with an error; and nothing is left behind."""
    text = (
        '[ "$1" = --version ] && exit 0\necho "In file included" >&2\necho "x.h:1: error: no such header" >&2\nexit 1'
    )
    broken = program(fresh / "cc", text)
    monkeypatch.setenv("PATH", str(fresh))
    assert libraries.library() is None
    assert libraries.why_not() == f"{broken}: x.h:1: error: no such header"
    assert [path.name for path in (fresh / "home" / ".cache" / "hybridflow").iterdir()] == ["lock"]
    assert computes_as_torch()


def test_a_file_that_is_no_library_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(
        fresh / "cc", '[ "$1" = --version ] && exit 0\nfor x; do [ "$last" = -o ] && echo text > "$x"; last=$x; done'
    )
    monkeypatch.setenv("PATH", f"{fresh}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert libraries.library() is None
    assert "file too short" in libraries.why_not() or "invalid ELF header" in libraries.why_not()


@NEEDED
def test_a_home_that_cannot_be_written_to(quick: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "home").write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    assert libraries.library() is not None and not computes_as_torch()
    assert sorted(path.name for path in fresh.iterdir()) == ["bin", "home"]


def test_the_user_wants_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLOW_NATIVE", "0")
    assert libraries.why_not() == "HYBRIDFLOW_NATIVE is 0" and computes_as_torch()
    libraries._found.cache_clear()
    monkeypatch.setenv("HYBRIDFLOW_NATIVE", "no")
    with pytest.raises(EnvironmentProblem, match="HYBRIDFLOW_NATIVE is 'no': 0 does without"):
        libraries.why_not()


def test_a_cpu_without_avx2(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert libraries.why_not() == "this CPU has no AVX2 (DEFAULT)"


@pytest.fixture
def alone() -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.thorough
def test_where_one_rank_has_none_all_do_without(
    fresh: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "failures", lambda own, group: ["rank 3: there is no C compiler (cc, gcc, clang)"])
    platforms.agree_on_kernels(alone)
    assert libraries.library() is None and computes_as_torch()
    assert platforms.kernel_line() == (
        f"kernels for training: {platforms.IN_C} by torch, slower than in C "
        "(rank 3: there is no C compiler (cc, gcc, clang))"
    )


@NEEDED
def test_where_all_have_them_they_are_used(quick: Path, alone: dist.ProcessGroup) -> None:
    platforms.agree_on_kernels(alone)
    assert libraries.library() is not None and not computes_as_torch()
    line = f"kernels for training: {platforms.IN_C} in C, compiled for this CPU"
    units = " and its matrix units, which multiply float32 too" if matrix.has_units() else ""
    assert platforms.kernel_line() == line + units


@NEEDED
def test_where_one_cpu_has_no_matrix_units_none_are_used(
    quick: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    def failures(own: str | None, group: dist.ProcessGroup) -> list[str]:
        told.append(own)
        return [] if own is None and len(told) == 1 else ["rank 3: this CPU has no matrix units"]

    monkeypatch.setattr(platforms, "failures", failures)
    monkeypatch.setattr(matrix, "_given_up", [])
    had_them = matrix.has_units()
    platforms.agree_on_kernels(alone)
    assert told == [None, None if had_them else "this CPU has no matrix units"]
    assert not matrix.has_units() and not computes_as_torch()
    assert platforms.kernel_line().endswith("compiled for this CPU")


@NEEDED
def test_small_numbers_stay_what_they_are(needs_kernels: None) -> None:
    """The start-up code of -ffast-math would have the whole process flush them to zero."""
    assert libraries.library() is not None
    assert (torch.tensor([1e-40]) * 1.0).item() > 0.0


@NEEDED
@pytest.mark.thorough
def test_the_sources_compile_without_a_warning(tmp_path: Path) -> None:
    compiler = next(path for path in map(libraries.shutil.which, libraries.COMPILERS) if path)
    for flags in ([], ["-mno-avx512f"]) if has_wide_vectors() else ([],):
        command = [
            compiler,
            *libraries.FLAGS,
            *flags,
            "-Wall",
            "-Wextra",
            "-Werror",
            *(str(libraries.HERE / name) for name in libraries.SOURCES),
        ]
        subprocess.run([*command, "-o", str(tmp_path / "x.so"), "-lm"], check=True)
