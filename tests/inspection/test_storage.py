"""The output directory: written to, left as it was, and said why where it cannot be written."""

from pathlib import Path

import pytest

from hybridflow.inspection import storage
from hybridflow.inspection.storage import MOST_BYTES, space_finding, speed_finding, storage_findings


def test_a_directory_is_left_as_it_was(tmp_path: Path) -> None:
    space, speed = storage_findings(str(tmp_path), "a")
    assert (space.name, speed.name) == ("free space", "write speed")
    assert space.figures["free_bytes"] > 0 and speed.figures["bytes_per_second"] > 0
    assert space.value.endswith(f"free in {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    space, _ = storage_findings(str(tmp_path / "runs" / "mine"), "a")
    assert space.value.endswith(f"free in {tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "below/it"])
def test_one_below_a_file_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / name
    [found] = storage_findings(str(path), "a")
    assert found.status == "fail"
    assert found.value == f"output_dir = {path}: cannot write to {path}: Not a directory"
    assert "or set output_dir" in found.advice


def test_one_that_nobody_may_write_to() -> None:
    [found] = storage_findings("/proc/hybridflow", "a")  # not even root
    assert found.status == "fail" and "cannot write to /proc/hybridflow" in found.value


def test_writing_ends_by_the_clock_or_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage._write(tmp_path)[0] <= MOST_BYTES
    monkeypatch.setattr(storage, "SECONDS", 0.0)
    assert storage._write(tmp_path)[0] == 0


def test_what_is_little_and_what_is_slow() -> None:
    assert space_finding(1 << 30, Path("runs"), "a").status == "ok"
    assert space_finding((1 << 30) - 1, Path("runs"), "a").status == "warn"
    found = speed_finding(5e6, Path("runs"), "a")
    assert (found.status, found.value) == ("warn", "5 MB/s to runs")
    assert speed_finding(20e6, Path("runs"), "a").status == "ok"
