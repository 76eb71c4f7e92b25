"""Under real torchrun: a run that is told to end is saved and goes on; torchrun's restarts go on by themselves."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.checkpoint.store import damage, read_manifest, step_name, steps
from tests.checkpoint.test_kills import rows as all_rows
from tests.distributed.test_faults import children, descendants, left
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import finish, run_ranks, start_torchrun

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 10  # as tests.checkpoint.test_kills counts
SETTINGS = (f"num_iterations={NUM_ITERATIONS}", "reward.normalization=running", "algorithm.kl.controller=adaptive")
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


def has_rows(run: Path, count: int) -> bool:
    file = run / "metrics.csv"
    return file.exists() and len(file.read_text().splitlines()) > count


@pytest.mark.parametrize(("sign", "to"), [(signal.SIGTERM, "torchrun"), (signal.SIGUSR1, "a rank")])
def test_a_run_that_is_told_to_end_is_saved_and_goes_on(sign: signal.Signals, to: str, root: Path) -> None:
    name = sign.name
    agent = started(root, name, worker=("hybridflow.train",))
    wait_for(lambda: has_rows(root / name, 2), agent)
    processes = descendants(agent.pid)
    os.kill(agent.pid if to == "torchrun" else children(agent.pid)[1], sign)
    done = finish(agent, SECONDS)
    assert done.returncode == 1 and left(processes) == []
    [told] = re.findall(r"hybridflow: stopped (?:in|after) iteration (\d+)", done.stdout)
    assert "it is saved: the same command goes on from there" in done.stdout
    if to == "a rank":  # of which torchrun tells the status
        assert re.search(r"exitcode\s+: 75", done.stderr), done.stderr
    [saved] = steps(root / name / "checkpoints")
    assert saved in (int(told), int(told) - 1)
    said = go_on(root, name)
    assert f"goes on from {root / name / 'checkpoints' / step_name(saved)}" in said
    assert all_rows(root / name) == all_rows(root / "undisturbed")


def test_a_second_signal_ends_at_once_and_leaves_the_checkpoint_before(root: Path) -> None:
    agent = started(root, "twice", "checkpoint.save_interval=1", worker=("tests.checkpoint.slow_worker",))
    checkpoints = root / "twice" / "checkpoints"
    wait_for(lambda: (checkpoints / ".step_000002.partial").exists(), agent)
    processes = descendants(agent.pid)
    for rank in (children(agent.pid)[0], children(agent.pid)[0]):
        os.kill(rank, signal.SIGTERM)
        time.sleep(1.5)
    done = finish(agent, 40.0)
    assert done.returncode == 1 and left(processes) == []
    assert "a second signal, SIGTERM, after SIGTERM" in done.stderr
    assert re.search(r"exitcode\s+: 76", done.stderr), done.stderr
    assert steps(checkpoints) == [1]
    assert damage(checkpoints / step_name(1), read_manifest(checkpoints / step_name(1)).files) == []
    go_on(root, "twice")
    assert all_rows(root / "twice") == all_rows(root / "undisturbed")


def test_torchruns_restarts_go_on_from_the_last_checkpoint(root: Path) -> None:
    killed = ("tests.checkpoint.killed_worker", "1", STEP, "9", "0")  # in the third iteration
    agent = started(root, "restart", "checkpoint.save_interval=1", worker=killed, options=("--max-restarts", "1"))
    done = finish(agent, SECONDS)
    assert done.returncode == 0, done.stderr
    assert f"goes on from {root / 'restart' / 'checkpoints' / step_name(2)}" in done.stdout
    assert all_rows(root / "restart") == all_rows(root / "undisturbed")


def test_restarts_without_progress_end_the_run(root: Path) -> None:
    killed = ("tests.checkpoint.killed_worker", "1+", STEP, "1", "0")
    overrides = ("checkpoint.save_interval=1", "checkpoint.max_restarts_without_progress=1")
    agent = started(root, "stuck", *overrides, worker=killed, options=("--max-restarts", "2"))
    done = finish(agent, SECONDS)
    assert done.returncode == 1
    assert "1 restarts in a row began after iteration 0, and none came to a later checkpoint" in done.stderr


def test_what_was_told_to_end_is_not_started_again(root: Path) -> None:
    """torchrun takes 75 for a failure like any other."""
    hours = "checkpoint.max_hours=1e-9"
    agent = started(root, "hours", hours, worker=("hybridflow.train",), options=("--max-restarts", "1"))
    done = finish(agent, SECONDS)
    assert done.returncode == 1
    assert done.stdout.count("hybridflow: stopped in iteration 1") == 1
    assert done.stdout.count("hybridflow: stopped before this restart: it was told to end") == 1
    assert "iteration 1/" not in done.stdout
    go_on(root, "hours")
    assert all_rows(root / "hours") == all_rows(root / "undisturbed")
