"""The target appears whole or not at all, and nothing else is touched."""

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridflow.convert import output
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.convert.verify import verify
from hybridflow.errors import CheckpointError
from hybridflow.formats.directories import replace_directory
from hybridflow.formats.safetensors_files import SafetensorsDirectory
from tests.launch import ROOT
from tests.messages import like
from tests.tools.convert.tiny import left_in, rewrite, tensors_of


def refusal(convert: Callable, source: Path, target: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ what may be written


def test_an_existing_target_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("mine")
    assert refusal(to_megatron, source, target) == f"{target}: exists; --overwrite replaces it"
    assert (target / "config.json").read_text() == "mine"


def test_overwrite_replaces_the_whole_directory(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "old.safetensors"):
        (target / name).write_text("old")
    to_megatron(source, target, overwrite=True)
    assert verify(source, target) == []
    assert "old.safetensors" not in left_in(target)
    assert left_in(tmp_path) == ["source", "target"]


def test_overwrite_spares_what_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("mine")
    assert "is therefore no checkpoint" in refusal(to_megatron, source, tmp_path / "home", overwrite=True)
    (tmp_path / "file").write_text("mine")
    assert "exists and is no directory" in refusal(to_megatron, source, tmp_path / "file", overwrite=True)
    assert left_in(tmp_path) == ["file", "home", "source"]


def test_the_source_is_never_written_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = left_in(source)
    for target in (source, tmp_path / "link", tmp_path / "other" / ".." / "source"):
        assert "are the same directory" in refusal(to_megatron, source, target, overwrite=True)
    for target in (source / "inside", source / "deep" / "inside", tmp_path):
        assert "lie in one another" in refusal(to_megatron, source, target, overwrite=True)
    assert left_in(source) == before


def test_too_little_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 12345, 12345)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert refusal(to_megatron, source, tmp_path / "target") == (
        like(
            f"{tmp_path}: too little room on the disk: 17,075,456 bytes are needed (17.08 MB), 12,345 are free "
            f"(12.35 kB)"
        )
    )
    assert left_in(tmp_path) == ["source"]


# -------------------------------------------------------------------------------------------- after an error


def fail_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor of a HuggingFace directory cannot be read."""
    read = SafetensorsDirectory.read

    def failing(self: SafetensorsDirectory, name: str, *where: object) -> torch.Tensor:
        if name == "lm_head.weight":
            raise CheckpointError("the disk is on fire")
        return read(self, name, *where)

    monkeypatch.setattr(SafetensorsDirectory, "read", failing)


def test_an_error_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_late(monkeypatch)
    target = tmp_path / "new" / "deep" / "target"
    assert refusal(to_megatron, source, target) == "the disk is on fire"
    assert left_in(tmp_path) == ["source"]


def test_an_error_leaves_the_old_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    to_megatron(source, target)
    fail_late(monkeypatch)
    assert refusal(to_megatron, source, target, overwrite=True) == "the disk is on fire"
    monkeypatch.undo()
    assert verify(source, target) == []
    assert left_in(tmp_path) == ["source", "target"]


def test_numbers_too_large_for_a_dtype_leave_nothing(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    tensors["model.norm.weight"][3] = -70000.0
    rewrite(source, tensors)
    to_megatron(source, tmp_path / "megatron")
    message = refusal(to_huggingface, tmp_path / "megatron", tmp_path / "target", dtype=torch.float16)
    assert "model.norm.weight holds 70000, too large for torch.float16, whose largest number is 65504" in message
    assert left_in(tmp_path) == ["megatron", "source"]


def test_every_byte_is_on_the_disk_before_the_name_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    late: list[Path] = []

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    def replace(partial: Path, target: Path) -> None:
        late.extend(path for path in [partial, *partial.rglob("*")] if path.stat().st_ino not in synced)
        replace_directory(partial, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(output, "replace_directory", replace)
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=100_000)
    assert late == []
    assert tmp_path.stat().st_ino in synced  # the name


# ------------------------------------------------------------------------------------------------- killed


def kill_in_the_middle(*arguments: object) -> None:
    command = [sys.executable, "-m", "tests.tools.convert.slow_worker", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "writing\n"
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=60)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.thorough
def test_a_killed_conversion_leaves_nothing_that_looks_finished(back: bool, source: Path, tmp_path: Path) -> None:
    target, convert = tmp_path / "target", to_megatron
    if back:
        to_megatron(source, tmp_path / "megatron")
        source, convert = tmp_path / "megatron", to_huggingface
    before = left_in(tmp_path)
    kill_in_the_middle(source, target, *(["--back"] if back else []))
    assert left_in(tmp_path) == [".target.partial", *before]
    assert "config.json" not in left_in(tmp_path / ".target.partial")
    convert(source, target)
    assert verify(source, target) == []
    assert left_in(tmp_path) == [*before, "target"]


@pytest.mark.thorough
def test_a_conversion_killed_while_it_overwrites_leaves_the_old_target(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    to_megatron(source, target)
    kill_in_the_middle(source, target, "--overwrite")
    assert verify(source, target) == []
    to_megatron(source, target, overwrite=True)
    assert left_in(tmp_path) == ["source", "target"]


def test_two_conversions_to_one_target(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".target.partial"
    partial.mkdir()
    other = os.open(partial, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    expected = f"{partial}: another conversion is writing here; wait for its end"
    assert refusal(to_megatron, source, tmp_path / "target") == expected
    assert partial.exists()
    os.close(other)
    to_megatron(source, tmp_path / "target")
    assert left_in(tmp_path) == ["source", "target"]


# ------------------------------------------------------------------------------------------ what goes wrong at the end


def test_the_old_target_is_back_where_the_new_cannot_take_its_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    to_megatron(source, target)
    before = {name: (target / name).read_bytes() for name in left_in(target)}
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError("no more")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no more"):
        to_megatron(source, target, overwrite=True)
    assert {name: (target / name).read_bytes() for name in left_in(target)} == before
    assert left_in(tmp_path) == ["source", "target"]


@pytest.mark.parametrize("command", ["hf-to-megatron", "megatron-to-hf"])
@pytest.mark.thorough
def test_a_disk_that_takes_no_more(command: str, source: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for it: the same call fails."""
    given = source
    if command == "megatron-to-hf":
        to_megatron(source, given := tmp_path / "given")
    limit = 20_000  # bytes: the weights are more

    done = subprocess.run(
        [sys.executable, "-m", "tools.convert", command, str(given), str(tmp_path / "target")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    [line] = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1 and line.startswith("tools.convert: error: ") and "cannot be written: " in line
    assert "File too large" in line
    assert not (tmp_path / "target").exists() and not [name for name in left_in(tmp_path) if "partial" in name]


def test_processes_that_do_not_see_the_targets_disk(source: Path, tmp_path: Path) -> None:
    """The first process makes the directory; here it is gone when the second looks."""
    second = output.Processes(rank=1, count=1)
    with pytest.raises(CheckpointError, match="all processes must see the disk of the target"):
        with output.new_directory(tmp_path / "target", num_bytes=1, processes=second):
            pytest.fail("the block was entered")
