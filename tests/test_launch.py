"""The launchers of the distributed tests: a hang ends, and says where every rank stood; a failure ends all ranks."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import launch
from tests.forks import ROOT, run_forks, servers
from tests.launch import finish, run_ranks, start_torchrun, torchrun

WORKER = "tests.launch_worker"
ENDING = "tests.ending_worker"

pytestmark = pytest.mark.distributed


def told(directory: Path) -> list[tuple[int, int]]:
    """Pid of each rank, and its hash of a string."""
    return [tuple(map(int, (directory / rank).read_text().split())) for rank in ("0", "1")]


@pytest.mark.thorough
def test_a_hang_under_torchrun_ends_with_the_stacks_of_every_rank(tmp_path: Path) -> None:
    agent = start_torchrun(2, "-m", WORKER, tmp_path)
    while not all((tmp_path / rank).exists() for rank in ("0", "1")):
        assert agent.poll() is None
        time.sleep(0.1)
    with pytest.raises(AssertionError, match=r"(?s)no end after 1 s.*in rank_waits_here.*in rank_waits_here"):
        finish(agent, 1)


@pytest.mark.thorough
def test_a_hang_of_forks_ends_with_the_stacks_of_every_rank(tmp_path: Path) -> None:
    status, _, error = run_forks(2, WORKER, [str(tmp_path)], seconds=10)
    assert status is None and error.count("in rank_waits_here") == 2
    (first, its_hash), (second, other_hash) = told(tmp_path)
    assert not any(Path(f"/proc/{pid}").exists() for pid in (first, second))
    assert its_hash != other_hash, "ranks that torchrun starts go through a set of strings in unlike orders"


@pytest.mark.parametrize("failing", ["0", "1"])
def test_the_failure_of_one_fork_ends_all(failing: str, tmp_path: Path) -> None:
    status, _, error = run_forks(2, WORKER, [str(tmp_path), failing], seconds=600)
    assert status == 1 and error.count("RuntimeError: this rank fails") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid, _ in told(tmp_path))
    with pytest.raises(AssertionError, match="RuntimeError: this rank fails"):
        run_ranks(2, WORKER, tmp_path, failing)


@pytest.mark.parametrize("how", ["return", "fail", "no-status", "3", "257", "a message"])
def test_a_fork_ends_as_a_process_of_its_own_does(how: str, tmp_path: Path) -> None:
    """Status and output, after its threads and what was registered for its end."""
    alone = subprocess.run([sys.executable, "-m", ENDING, how], cwd=ROOT, capture_output=True, text=True)
    out, error = tmp_path / "out", tmp_path / "error"
    server = servers()[0]
    rank = {"environment": dict(os.environ), "module": ENDING, "arguments": [how], "out": str(out), "error": str(error)}
    pid, ended = server.fork(rank), {}
    while not ended:
        time.sleep(0.02)
        ended = server.ended()
    assert ended == {pid: alone.returncode}
    assert out.read_text() == alone.stdout and alone.stdout.count("\n") == 3
    assert error.read_text().splitlines()[-1:] == alone.stderr.splitlines()[-1:]


def test_no_ranks_without_the_mark() -> None:
    token = launch.MARKED.set(False)
    try:
        for start in (run_ranks, torchrun):
            with pytest.raises(AssertionError, match=r"needs @pytest\.mark\.distributed"):
                start(1, WORKER)
    finally:
        launch.MARKED.reset(token)


@pytest.mark.thorough
def test_no_rank_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    code = (
        "from tests.forks import Server, run_forks; bare = [Server('1', bare=True), Server('2', bare=True)]; "
        f"run_forks(2, {WORKER!r}, [{str(tmp_path)!r}], seconds=6000, of=bare)"
    )
    tests = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not all((tmp_path / rank).exists() for rank in ("0", "1")):
        assert tests.poll() is None
        time.sleep(0.1)
    tests.kill()
    tests.wait()
    left = [Path(f"/proc/{pid}") for pid, _ in told(tmp_path)]
    until = time.monotonic() + 60
    while any(path.exists() for path in left) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(path.exists() for path in left)
