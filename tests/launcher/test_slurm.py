"""launch/slurm.sbatch under a real Slurm: how jobs on one and two nodes train, stop, go on and end.

Where it is the script, Slurm and the launcher that are tested, the ranks are those of tests/launcher/idle; what trains,
loads or has a wrong config is real.
"""

import csv
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.forks import ROOT
from tests.launcher.jobs import kill, words
from tests.launcher.slurm import GPUS, Job, Slurm, cluster

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

IDLE = ROOT / "tests" / "launcher" / "idle"  # on Python's path: ranks that only wait
SCRIPT = "launch/slurm.sbatch"
REWARD = """
import time
def slow(prompts, responses, columns):
    time.sleep(1)  # there is time to tell the run something in the middle
    return [len(response) / 8 for response in responses]
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Signals go to all processes of a step; a node is lost after Slurm's own 300 s."""
    with cluster(tmp_path_factory.mktemp("linuxproc")) as made:
        yield made


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test that failed has not ended would keep its nodes from the tests after it."""
    yield
    for name in {"slurm", "slurm_of_cgroups"} & set(request.fixturenames):
        request.getfixturevalue(name).cancel_all()


@pytest.fixture(scope="module")
def slurm_of_cgroups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("cgroup"), "cgroup", "SlurmdTimeout=10") as made:
        yield made


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def root(tmp_path: Path, inputs: Path) -> Path:
    """What the script sees of a repository, and a config. Runs are written here."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = json.loads(write_config(tmp_path / "config.yaml", inputs).read_text())
    config |= {"output_dir": ".", "platform": "cpu"}
    for model in ("actor", "reference"):
        config[model]["tensor_parallel_size"] = 1
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "told.py").write_text(REWARD)
    return tmp_path


def train(slurm: Slurm, root: Path, *words: str) -> Job:
    return slurm.submit(root, *words, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def idle(slurm: Slurm, root: Path, *options: str, ranks: int = 2, **variables: str) -> Job:
    """A job of so many ranks that only wait, once they all do."""
    variables = {"PYTHONPATH": f"{IDLE}:{ROOT}", "OMP_NUM_THREADS": "1", **variables}
    job = slurm.submit(root, *options, SCRIPT, "config.yaml", **variables)
    job.wait_for(lambda: len(job.ranks()) >= ranks and len(environments(root)) >= ranks)
    return job


def environments(root: Path) -> list[dict[str, str]]:
    """Of the ranks that only wait."""
    return [json.loads(file.read_text()) for file in sorted(root.glob("rank_*.json"))]


# ------------------------------------------------------------------------------------------------ it trains


def test_a_run_that_is_told_in_the_middle_is_requeued_and_goes_on(slurm: Slurm, root: Path) -> None:
    """On two nodes, with one of each node's two GPUs. That the numbers are those of a run that nobody disturbs:
    tests/checkpoint/test_stops.py.
    """
    settings = ["config.yaml", "num_iterations=6", "reward.functions=[{function: told:slow}]", "reward.models=[]"]
    job = train(slurm, root, "--nodes=2", "--gpus-per-node=1", SCRIPT, *settings, "name=told")
    job.wait_for(lambda: job.rows("told") > 0)
    job.tell("USR1")
    assert job.wait() == ("COMPLETED", "0:0", "1"), job.said
    assert (
        f"slurm.sbatch: stopped as told: job {job.number} is requeued and resumes from its last checkpoint" in job.said
    )
    assert re.search(r"resumes from told/checkpoints/step_00000[1-5]", job.said), job.said
    with (root / "told" / "metrics.csv").open() as stream:
        assert [row["iteration"] for row in csv.DictReader(stream)] == ["1", "2", "3", "4", "5", "6"]
    assert slurm.left() == {}


def test_a_wrong_config(slurm: Slurm, root: Path) -> None:
    job = train(slurm, root, "--nodes=1", "--gpus-per-node=1", SCRIPT, "config.yaml", "actor.optimiser.lr=1")
    assert job.wait() == ("FAILED", "1:0", "0")
    assert "actor.optimiser" in job.said and slurm.left() == {}


# ------------------------------------------------------------------------------------------------ it is told to end


def test_a_job_that_is_told_while_it_loads_begins_again(slurm: Slurm, root: Path) -> None:
    """Before torchrun has ranks, and while these load."""
    job = train(slurm, root, "--nodes=2", "--gpus-per-node=1", SCRIPT, "config.yaml")
    job.wait_for(lambda: bool(job.torchruns()))
    job.tell("USR1")
    job.wait_for(lambda: job.facts["Restarts"] == "1" and bool(job.ranks()))
    assert "slurm.sbatch: told while it was loading: there is nothing to save" in job.said
    job.tell("USR1")
    job.wait_for(lambda: job.facts["Restarts"] == "2")
    job.cancel()
    assert job.wait()[0] == "CANCELLED", job.said
    assert slurm.left(10) == {} and not (root / "run" / "metrics.csv").exists()


def test_a_time_limit_that_leaves_no_time_to_load_is_named(slurm: Slurm, root: Path) -> None:
    """Else the job would be requeued again and again."""
    job = train(slurm, root, "--nodes=1", "--gpus-per-node=1", "--time=11", SCRIPT, "config.yaml")
    job.wait_for(lambda: bool(job.torchruns()))
    job.tell("USR1")
    assert job.wait() == ("FAILED", "1:0", "0"), job.said
    assert "slurm.sbatch: --time, 660 s: 600 s before its end (--signal) the run is told to save" in job.said


def test_term_saves_and_does_not_requeue(slurm: Slurm, root: Path) -> None:
    """Two nodes with one of two GPUs each. Meanwhile: how long Slurm waits for a node that is lost."""
    job = idle(slurm, root, "--nodes=2", "--gpus-per-node=1")
    assert [(each["RANK"], each["WORLD_SIZE"], each["MASTER_ADDR"]) for each in environments(root)] == [
        ("0", "2", "n1"),
        ("1", "2", "n1"),
    ]
    [wait] = {word.partition("=")[2] for pid in job.processes() for word in words(pid) if word.startswith("--wait=")}
    [timeout] = re.findall(r"^SlurmdTimeout\s+= (\d+) sec$", slurm.call("scontrol", "show", "config"), re.M)
    assert int(wait) > 60 + int(timeout) * 4 / 3, "Slurm looks at a node every third of its timeout"
    job.tell("TERM")
    assert job.wait() == ("FAILED", "75:0", "0"), job.said
    assert slurm.left() == {} and list((root / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(("proctrack", "nodes"), [("slurm", 2), ("slurm_of_cgroups", 1)])
def test_a_cancelled_job_saves_and_leaves_nothing_behind(
    proctrack: str, nodes: int, root: Path, request: pytest.FixtureRequest
) -> None:
    """For as long as Slurm gives it, KillWait. Two ranks, on two nodes or on one."""
    slurm = request.getfixturevalue(proctrack)
    job = idle(slurm, root, f"--nodes={nodes}", f"--gpus-per-node={GPUS // nodes}", SAVE_SECONDS="3")
    job.cancel()
    assert job.wait()[0] == "CANCELLED"
    assert slurm.left() == {}, job.said
    assert list((root / "run" / "checkpoints").glob("step_*")), job.said
    assert "lost" not in job.said


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_killed_rank_ends_the_job(slurm: Slurm, root: Path) -> None:
    job = idle(slurm, root, "--nodes=2", "--gpus-per-node=1")
    for pid in job.ranks().values():
        kill([pid])
    assert job.wait() == ("FAILED", f"{128 + signal.SIGKILL}:0", "0"), job.said
    assert re.search(r"n2: rank 1 was killed by SIGKILL", job.said) and slurm.left() == {}


def test_a_lost_node_requeues_the_job_until_it_is_back(slurm_of_cgroups: Slurm, root: Path) -> None:
    slurm = slurm_of_cgroups
    job = idle(slurm, root, "--nodes=2", "--gpus-per-node=1")
    lost = slurm.net.hosts[1]
    slurm.net.kill_host(lost)
    job.wait_for(lambda: (job.facts["JobState"], job.facts["Restarts"]) == ("PENDING", "1"))
    assert slurm.left(10) == {}, "what has lost the node is ended on the other"
    slurm.net.boot(lost)
    slurm.net.link_up(lost)
    slurm.start_slurmd(lost)
    job.wait_for(lambda: len(job.ranks()) == 2)
    job.cancel()
    assert job.wait()[0] == "CANCELLED" and slurm.left() == {}


def test_the_name_of_the_master_has_to_resolve(slurm: Slurm, root: Path) -> None:
    _, second = slurm.net.hosts
    (root / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 launcher\n10.77.0.3 n2\n")
    slurm.net.mount(second, root / "hosts", Path("/etc/hosts"))
    try:
        job = train(slurm, root, "--nodes=2", "--gpus-per-node=1", SCRIPT, "--rdzv-timeout", "3", "config.yaml")
        assert job.wait()[0] == "FAILED"
    finally:
        slurm.net.run(second, ["umount", "/etc/hosts"]).wait()
    assert "node 1, n2: the first host's name n1 does not resolve within 3 s" in job.said and slurm.left() == {}


# ------------------------------------------------------------------------------------------------ its ranks


def test_two_jobs_share_a_node(slurm: Slurm, root: Path) -> None:
    """Each has a GPU and a port of its own, and the end of one does not concern the other."""
    options = ["--nodes=1", "--nodelist=n1", "--gpus-per-node=1", "--exclusive=user"]
    roots = [root / "a", root / "b"]
    for each in roots:
        each.mkdir()
        for name in ("launch", ".venv", "config.yaml"):
            (each / name).symlink_to(root / name)
    jobs = [idle(slurm, each, *options, ranks=1) for each in roots]
    [first], [second] = map(environments, roots)
    assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
    assert first["MASTER_PORT"] != second["MASTER_PORT"] and first["SLURMD_NODENAME"] == second["SLURMD_NODENAME"]
    jobs[0].tell("TERM")
    assert jobs[0].wait() == ("FAILED", "75:0", "0"), jobs[0].said
    assert jobs[1].facts["JobState"] == "RUNNING" and len(jobs[1].ranks()) == 1
    jobs[1].cancel()
    assert jobs[1].wait()[0] == "CANCELLED" and slurm.left() == {}


def test_nodes_without_gpus_get_the_ranks_that_are_asked_for(slurm: Slurm, root: Path) -> None:
    job = idle(slurm, root, "--nodes=1", "--gpus-per-node=0", RANKS_PER_NODE="2")
    job.tell("TERM")
    assert job.wait() == ("FAILED", "75:0", "0"), job.said
    refused = train(slurm, root, "--nodes=1", "--gpus-per-node=0", SCRIPT, "config.yaml")
    assert refused.wait() == ("FAILED", "1:0", "0")
    assert "slurm.sbatch: no GPUs by --gpus-per-node, and RANKS_PER_NODE is not set" in refused.said
