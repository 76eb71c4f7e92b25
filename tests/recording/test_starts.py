"""starts.jsonl: what a run was started with, and how each start has ended."""

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from hybridflow import __version__
from hybridflow.errors import Stopped
from hybridflow.parallel.peer_processes import is_running, this_process
from hybridflow.parallel.versions import installed_version, source_commit
from hybridflow.recording.recorder import record_run
from hybridflow.recording.starts import RunStart, last_sign, read_starts, recorded_start, typed_command
from tests.recording.test_resume import config


def ended(run_dir: Path, error: BaseException | None = None) -> RunStart:
    """The last start of a run in which this happens."""
    with contextlib.suppress(BaseException), recorded_start(run_dir):
        if error is not None:
            raise error
    return read_starts(run_dir)[-1]


def test_rank_0_records_the_start_and_its_end(tmp_path: Path) -> None:
    c = config(tmp_path)
    with record_run(c, 5, rank=1, decode=str):
        assert read_starts(c.run_dir) == []
    with record_run(c, 5, rank=0, decode=str):
        [under_way] = read_starts(c.run_dir)
        assert (under_way.ended, under_way.how) == (None, None)
        assert is_running(*under_way.process) is True
    [start] = read_starts(c.run_dir)
    assert start.how == "finished" and start.ended is not None and start.ended >= start.began
    assert start.versions["hybridflow"] == __version__ and start.versions["torch"] == installed_version("torch")
    assert list(start.versions)[:4] == ["hybridflow", "torch", "megatron-core", "vllm"]
    assert start.commit == source_commit()


def test_how_a_start_ends(tmp_path: Path) -> None:
    stopped = ended(tmp_path, Stopped("after iteration 3 (SIGTERM)", saved=True))
    assert (stopped.how, stopped.why) == ("stopped", "after iteration 3 (SIGTERM)")
    failed = ended(tmp_path, ValueError("no such row\nand more"))
    assert (failed.how, failed.why) == ("failed", "ValueError: no such row")
    assert ended(tmp_path, KeyboardInterrupt()).why == "KeyboardInterrupt"
    broken = ended(tmp_path, RuntimeError("[pair.cc:537] Read error [127.0.0.1]:29585: Connection reset by peer"))
    assert (broken.how, broken.why) == ("failed", "another rank ended first, see logs/rank_*.log")
    assert [start.how for start in read_starts(tmp_path)] == ["stopped", "failed", "failed", "failed"]


def test_the_error_of_a_run_is_raised_where_its_end_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the cause"), recorded_start(tmp_path):
        (tmp_path / "starts.jsonl").unlink()
        (tmp_path / "starts.jsonl").mkdir()
        raise ValueError("the cause")


def test_the_next_start_ends_one_that_was_killed_when_its_last_row_was_written(tmp_path: Path) -> None:
    ended(tmp_path)
    file, metrics = tmp_path / "starts.jsonl", tmp_path / "metrics.csv"
    [began, _] = file.read_text().splitlines()
    first = json.loads(began)["began"]
    file.write_text(f'{began}\n{{"ended": 17')  # killed in the middle of a line
    [killed] = read_starts(tmp_path)
    assert killed.ended is None and last_sign(tmp_path, killed) == first
    metrics.touch()
    os.utime(metrics, (first + 60, first + 60))
    ended(tmp_path)
    former, latest = read_starts(tmp_path)
    assert (former.how, former.ended) == ("lost", first + 60)
    assert latest.how == "finished"


@pytest.mark.parametrize(
    ("words", "by_command", "is_rank", "command"),
    [
        (
            ["/env/bin/python", "-u", "-m", "hybridflow.train", "--fetched", "a b.yaml", "seed=2", "--nproc", "2"],
            True,
            True,
            "hybridflow train 'a b.yaml' seed=2 --nproc 2",
        ),
        (["/env/bin/python", "/env/bin/hybridflow", "my.yaml"], False, False, "hybridflow my.yaml"),
        (["python3", "-m", "hybridflow.train", "my.yaml"], False, False, "python -m hybridflow.train my.yaml"),
        (["python3", "-u", "mine.py", "7"], False, True, "torchrun ... mine.py 7"),
    ],
)
def test_the_command_as_it_was_typed(words: list[str], by_command: bool, is_rank: bool, command: str) -> None:
    assert typed_command(words, by_command=by_command, is_rank=is_rank) == command


@pytest.mark.parametrize(
    ("parent", "command"),
    [
        (["/env/bin/python", "/env/bin/torchrun", "--nproc-per-node", "2", "-m", "hybridflow.train", "my.yaml"],
         "torchrun --nproc-per-node 2 -m hybridflow.train my.yaml"),
        (["python", "-u", "-m", "torch.distributed.run", "--nnodes", "2", "mine.py"], "torchrun --nnodes 2 mine.py"),
        (["bash", "starts_ranks.sh"], "torchrun ... -m hybridflow.train my.yaml"),
    ],
)  # fmt: skip
def test_the_command_of_a_rank_is_torchruns(parent: list[str], command: str) -> None:
    words = ["python", "-u", "-m", "hybridflow.train", "my.yaml"]
    assert typed_command(words, by_command=False, is_rank=True, parent=parent) == command


def test_a_process_that_is_gone_and_one_of_another_machine() -> None:
    own = this_process(0)
    assert is_running(own.machine, own.pid, own.start_time) is True
    assert is_running(own.machine, own.pid, own.start_time + 1) is False  # its number went to another
    assert is_running("another", own.pid, own.start_time) is None


def test_the_commit_of_a_checkout_and_that_it_was_changed(tmp_path: Path) -> None:
    package = tmp_path / "checkout" / "site-packages"
    package.mkdir(parents=True)
    root, file = package.parent, package.parent / "file"
    file.write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "file"], [*author, "commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert source_commit(root) == head.stdout[:12]
    file.write_text("2")
    assert source_commit(root) == f"{head.stdout[:12]}-dirty"
    assert source_commit(package) is None  # installed within a user's checkout
