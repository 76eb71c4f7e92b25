"""How the ranks that one command starts have ended, and what the command says of it: once, when all are gone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch import ROOT

RUN = """
import json, sys
from hybridflow.parallel.agent import run_ranks
end = run_ranks(["-c", sys.argv[1]], 2, grace_seconds=20)
print(json.dumps([end.status, end.message, end.by_rank]))
"""
RANK = """
import os, signal, sys, time
from hybridflow.parallel.agent import write_error
rank = int(os.environ["RANK"])
file = os.environ["TORCHELASTIC_ERROR_FILE"]
{what}
time.sleep(60)
"""
SAVES = """
import pathlib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path({folder!r}, str(rank)).touch()
"""


def started(what: str, directory: Path = ROOT) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", RUN, RANK.format(what=what)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str | None, bool]:
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0 and "Traceback" not in error, error
    status, message, told = json.loads(out.splitlines()[-1])
    return status, message, told


@pytest.mark.distributed
def test_all_ranks_are_done(tmp_path: Path) -> None:
    """And import Python's own modules, whatever files lie in the working directory."""
    (tmp_path / "random.py").write_text("raise ImportError('of the user')\n")
    assert ended(started("import random; sys.exit(0)", tmp_path)) == (0, None, False)


@pytest.mark.distributed
def test_the_error_of_a_rank_is_told_whoever_ends_first(tmp_path: Path) -> None:
    """The other one begins before it ends, and heeds no signal meanwhile, as ranks do not."""
    there = str(tmp_path / "there")
    what = (
        f"while rank == 0 and not os.path.exists({there!r}):\n    pass\n"
        "rank == 0 and sys.exit(1)\n"
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({there!r}, 'w').close()\n"
        "write_error(file, 'hybridflow: error: data.train = x')\nsys.exit(1)"
    )
    assert ended(started(what)) == (1, "hybridflow: error: data.train = x", True)


@pytest.mark.distributed
def test_a_rank_that_is_killed_is_named() -> None:
    status, message, _ = ended(started("rank == 1 and os.kill(os.getpid(), signal.SIGKILL)"))
    assert status == 128 + signal.SIGKILL
    assert message is not None and message.startswith("rank 1 (pid ") and "was killed by SIGKILL" in message


@pytest.mark.distributed
def test_a_rank_that_ends_without_a_word() -> None:
    status, message, _ = ended(started("rank == 1 and sys.exit(3)"))
    assert status == 3 and message is not None and message.startswith("rank 1 (pid ")
    assert message.endswith("ended with status 3; what it printed is above")


@pytest.mark.distributed
def test_ranks_that_are_told_to_end_save_and_give_the_status(tmp_path: Path) -> None:
    """The agent hands the signal on, and waits for what the ranks make of it."""
    process = started(SAVES.format(folder=str(tmp_path)))
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=600)
    assert json.loads(out) == [75, None, False]
    assert "hybridflow: SIGTERM: the ranks save and end, in 20 s at most" in error


@pytest.mark.thorough
@pytest.mark.distributed
def test_ranks_that_are_told_before_they_can_save_have_saved_nothing(tmp_path: Path) -> None:
    process = started(f"import pathlib\npathlib.Path({str(tmp_path)!r}, str(rank)).touch()")
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert json.loads(out) == [76, "stopped by SIGINT: nothing new was saved", False]
