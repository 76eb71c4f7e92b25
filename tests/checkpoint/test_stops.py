"""Under real torchrun: a run that is told to end is saved and goes on; torchrun's restarts go on by themselves."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.checkpoint.store import step_name, steps
from tests.checkpoint.kills import rows
from tests.distributed.test_faults import children, descendants, left
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import finish, free_port, run_ranks, start_torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

NUM_ITERATIONS = 14
SETTINGS = (
    *(f"num_iterations={NUM_ITERATIONS}", "reward.normalization=running", "algorithm.kl.controller=adaptive"),
    # else Adam makes whole steps of the rounding in gradients that are nearly zero, which another layout has otherwise
    *("actor.optimizer.eps=0.01", "critic.optimizer.eps=0.01"),
)
STEP = "hybridflow.models.optimizer:TrainedModel.step"  # twice an iteration for each model
SECONDS = 240.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and the run that nobody disturbs."""
    root = tmp_path_factory.mktemp("stops")
    write_config(root / "config.yaml", make_inputs(root / "inputs"))
    go_on(root, "undisturbed")
    return root


def go_on(root: Path, name: str, *overrides: str) -> str:
    return run_ranks(2, "hybridflow.train", root / "config.yaml", *SETTINGS, f"name={name}", *overrides).stdout


def started(root: Path, name: str, *overrides: str, worker: tuple[str, ...], options: tuple[str, ...] = ()) -> Any:
    return start_torchrun(2, *options, "-m", *worker, root / "config.yaml", *SETTINGS, f"name={name}", *overrides)


def wait_for(condition: Callable[[], bool], agent: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        if agent.poll() is not None or time.monotonic() > until:
            done = finish(agent, 60)
            raise AssertionError(f"it did not come to that\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def has_rows(run: Path, count: int) -> bool:
    file = run / "metrics.csv"
    return file.exists() and len(file.read_text().splitlines()) > count


def test_a_run_that_is_told_to_end_is_saved_and_goes_on(root: Path) -> None:
    """By a scheduler that signals a rank; SIGTERM of torchrun is told in tests/parallel/test_faults.py."""
    name = "told"
    agent = started(root, name, worker=("hybridflow.train",))
    wait_for(lambda: has_rows(root / name, 2), agent)
    processes = descendants(agent.pid)
    os.kill(children(agent.pid)[1], signal.SIGUSR1)
    done = finish(agent, SECONDS)
    assert done.returncode == 1 and left(processes) == []
    [told] = re.findall(r"hybridflow: stopped (?:in|after) iteration (\d+)", done.stdout)
    assert "the run is saved, and the same command resumes" in done.stdout
    assert re.search(r"exitcode\s+: 75", done.stderr), done.stderr
    [saved] = steps(root / name / "checkpoints")
    assert saved in (int(told), int(told) - 1)
    said = go_on(root, name)
    assert f"resumes from {root / name / 'checkpoints' / step_name(saved)}" in said
    assert rows(root / name) == rows(root / "undisturbed")


def test_a_lost_node_leaves_a_run_that_goes_on_with_the_others(root: Path) -> None:
    """Two agents of an elastic torchrun on this machine, a rank each; one of them is killed with its rank."""
    alone = ("actor.tensor_parallel_size=1", "checkpoint.save_interval=1")
    elastic = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "lost")
    port = free_port()
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{port}")  # the first agent's, which lives on
    worker = ("hybridflow.train",)
    stays = start_torchrun(1, *elastic, *endpoint, "-m", *worker, root / "config.yaml", *SETTINGS, "name=lost", *alone)
    wait_for(lambda: listens(port), stays)
    leaves = start_torchrun(1, *elastic, *endpoint, "-m", *worker, root / "config.yaml", *SETTINGS, "name=lost", *alone)
    wait_for(lambda: has_rows(root / "lost", 2), stays)
    for pid in (leaves.pid, *children(leaves.pid)):
        os.kill(pid, signal.SIGKILL)
    leaves.communicate()
    done = finish(stays, SECONDS)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, platform" in done.stdout and "1 rank, platform" in done.stdout
    assert f"resumes from {root / 'lost' / 'checkpoints'}" in done.stdout
    assert "ended without a word: killed by SIGKILL" in done.stderr
    for row, same in zip(rows(root / "lost"), rows(root / "undisturbed"), strict=True):
        for metric in ("actor/loss", "critic/loss", "kl/coef", "rollout/response_length_mean", "reward/score_mean"):
            assert float(row[metric]) == pytest.approx(float(same[metric]), rel=1e-4, abs=2e-5), metric


def restarted(root: Path, name: str, restarts: int, worker: tuple[str, ...], *overrides: str) -> str:
    """What ranks say that fail, as torchrun would have restarted them; without torchrun's half minute a start."""
    module, *arguments = worker
    arguments += [str(root / "config.yaml"), *SETTINGS, f"name={name}", *overrides]
    done = run_ranks(2, module, *arguments, check=False, restarts=restarts)
    assert done.returncode, done.stdout
    return done.stdout + done.stderr


def test_restarts_without_progress_end_the_run(root: Path) -> None:
    """Those that bring the run forward do not count; one by hand counts anew."""
    killed = ("tests.checkpoint.killed_worker", "1+", STEP)
    overrides = ("checkpoint.save_interval=1", "checkpoint.max_restarts_without_progress=1")
    forward, stuck = (*killed, "5", "0"), (*killed, "1", "0")  # one iteration further, or none
    for restarts, worker in enumerate((forward, forward, stuck)):
        assert "restarts in a row" not in restarted(root, "stuck", restarts, worker, *overrides)
    assert steps(root / "stuck" / "checkpoints")[-1] == 2
    said = restarted(root, "stuck", 3, stuck, *overrides)
    assert "1 restarts in a row began after iteration 2, and none came to a later checkpoint" in said
    go_on(root, "stuck")
    assert rows(root / "stuck") == rows(root / "undisturbed")


def test_what_was_told_to_end_is_not_started_again(root: Path) -> None:
    """torchrun takes 75 for a failure like any other."""
    worker, hours = ("hybridflow.train",), "checkpoint.max_hours=1e-9"
    assert "hybridflow: stopped in iteration 1" in restarted(root, "hours", 0, worker, hours)
    said = restarted(root, "hours", 1, worker, hours)
    assert "hybridflow: stopped before this restart: it was told to end" in said and "iteration 1/" not in said
