"""A real training run under torchrun of which a rank is stopped, or killed: the other ends, and says why."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import finish, start_torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

DEADLINE = 12  # seconds of a phase; the longest takes one on two cores
TOLD = 25.0  # seconds within which all end after a deadline, on a machine that others use too
PHASES = ("rollout", "estimate", "update", "save")  # save: ranks agree on a save after each iteration
VICTIM = 1
ENDLESS = ["num_iterations=100000"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def training(directory: Path, inputs: Path) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """torchrun, and the pids of its ranks, of which each has done an iteration."""
    config = write_config(directory / "config.yaml", inputs)
    deadlines = [f"watchdog.{phase}_seconds={DEADLINE}" for phase in PHASES]
    agent = start_torchrun(2, "-m", "hybridflow.train", config, *ENDLESS, *deadlines)
    metrics, until = directory / "run" / "metrics.csv", time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
        if agent.poll() is not None or time.monotonic() > until:
            done = finish(agent, 60)
            raise AssertionError(f"no iteration\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        time.sleep(0.1)
    return agent, {rank_of(pid): pid for pid in children(agent.pid)}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def rank_of(pid: int) -> int:
    [rank] = [x for x in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if x.startswith(b"RANK=")]
    return int(rank.removeprefix(b"RANK="))


def left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_stopped_rank_ends_the_run_with_a_report(tmp_path: Path, inputs: Path) -> None:
    agent, ranks = training(tmp_path, inputs)
    processes = descendants(agent.pid)
    os.kill(ranks[VICTIM], signal.SIGSTOP)
    done = finish(agent, DEADLINE + TOLD)
    assert done.returncode == 1 and left(processes) == []
    report = (tmp_path / "run" / "logs" / "hang_report.txt").read_text()
    lines = report.splitlines()
    assert re.fullmatch(
        rf"hybridflow: hang: rank 1 \(pid {ranks[VICTIM]} on \S+\) says nothing: it is stopped \(state T\)", lines[0]
    )
    [phase] = re.findall(rf"^  phase (\w+): rank 0 .* \(watchdog\.\1_seconds = {DEADLINE}\)$", lines[1])
    where = "checkpoint/manager.py" if phase == "save" else "flows/ppo.py"
    assert f"hybridflow/{where}" in report and "Python stacks of rank 0:\n  MainThread" in report
    assert report in done.stderr and done.stderr.count("hybridflow: hang:") == 1
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert f"(pid: {ranks[VICTIM]})" in root and "Signal 9 (SIGKILL)" in root
