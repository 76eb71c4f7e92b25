"""The launcher's command line, what it compares, what it prints and where its logs go; no host is asked."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.launcher.arguments import LaunchOptions, parse
from hybridflow.launcher.attempt import RANK_ENDED
from hybridflow.launcher.experiment import Experiment
from hybridflow.launcher.here import this_node, wait_for_name
from hybridflow.launcher.hostfile import LaunchError, LaunchHost
from hybridflow.launcher.job import differences, known_address, missing, too_few_gpus, unlike_gpus
from hybridflow.launcher.output import Output
from hybridflow.launcher.torchrun import Torchrun
from tests.forks import ROOT
from tests.messages import like

A, B, C = LaunchHost("a", 8), LaunchHost("b", 8), LaunchHost("c", 4)


def options(*words: str) -> LaunchOptions:
    return parse(["--hostfile", "hosts", "--python", "/opt/python", *words], "")


def run(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "run.py"), "--python", sys.executable, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------------ the command line


def test_config_overrides_and_the_rest() -> None:
    given = options("configs/x.yaml", "seed=3", "--nnodes", "2:3", "name=a b'c", "--", "--replay", "runs/x")
    assert given.config == "configs/x.yaml" and given.overrides == ("seed=3", "name=a b'c")
    assert given.rest == ("--replay", "runs/x") and given.nnodes == (2, 3)
    words = ["configs/x.yaml", "seed=3", "name=a b'c", "--replay", "runs/x"]
    assert given.module == ["-m", "hybridflow.train", *words]
    assert options("--config", "x.yaml", "seed=3").config == "x.yaml"
    assert options("--health", "--", "--json", "-").module == ["-m", "hybridflow.health", "--json", "-"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "which config?"),
        (["x.yaml", "y.yaml"], "'y.yaml' is no override, section.key=value, and x.yaml is the config already"),
        (["--config", "x.yaml", "y.yaml"], "'y.yaml' is no override"),
        (["x.yaml", "--nnodes", "3:2"], "--nnodes 3:2: MIN is 1 or more, and MAX no less"),
        (["x.yaml", "--nnodes", "two"], "--nnodes two: a number of hosts, or MIN:MAX"),
        (["/dev/stdin"], "/dev/stdin: is no file"),
        (["x.yaml", "--env", "1A=x"], "'1A' is no name of a variable"),
        (["x.yaml", "--env", "NOT_SET_HERE"], "--env NOT_SET_HERE: is not set here; --env NOT_SET_HERE=VALUE sets it"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(LaunchError) as error:
        options(*words)
    assert told in str(error.value)


def test_environment_by_name_and_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "a=b c")
    assert options("x", "--env", "FROM_HERE", "--env", "B=", "--env", "C=d=e").environment == {
        "FROM_HERE": "a=b c",
        "B": "",
        "C": "d=e",
    }


# ------------------------------------------------------------------------------------------------ torchrun


def test_commands_and_environment_of_each_host() -> None:
    given = options("x.yaml", "seed=1", "--env", "NCCL_DEBUG=INFO")
    experiment = Experiment(3, environment={"NCCL_DEBUG": "WARN", "HF_HOME": "/hf"}, grace_seconds=60)
    torchrun = Torchrun(given, experiment, [A, B, C], "10.0.0.1", 29500, restarts=2)
    expected = (
        "/opt/python -u -P -m torch.distributed.run --nnodes 3 --node-rank 2 --nproc-per-node 4 "
        "--master-addr 10.0.0.1 --master-port 29500 --rdzv-conf timeout=300 --shutdown-timeout 65 "
        "-m hybridflow.train x.yaml seed=1"
    )
    assert torchrun.command(C) == expected.split()
    assert [torchrun.offset(host) for host in (A, B, C)] == [0, 8, 16]
    assert torchrun.environment(B, "ib0") == {
        "NCCL_DEBUG": "INFO",  # --env comes before the config
        "HF_HOME": "/hf",
        "GLOO_SOCKET_IFNAME": "ib0",
        "OMP_NUM_THREADS": "1",
        "HYBRIDFLOW_HOSTS": "a=8,b=8,c=4",
        "HYBRIDFLOW_HOST": "b",
        "HYBRIDFLOW_RESTARTS": "2",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
    }
    own = options("x.yaml", "--env", "GLOO_SOCKET_IFNAME=eth9", "--env", "OMP_NUM_THREADS=4")
    assert Torchrun(own, experiment, [A, B], "h", 1).environment(A, "ib0")["GLOO_SOCKET_IFNAME"] == "eth9"
    assert Torchrun(own, experiment, [A, B], "h", 1).environment(A, "ib0")["OMP_NUM_THREADS"] == "4"


def test_the_masters_address() -> None:
    assert known_address(options("x", "--master-addr", "m"), [A, B]) == "m"
    assert known_address(options("x"), [A]) == "127.0.0.1"
    assert known_address(options("x"), [LaunchHost("192.0.2.7", 1), B]) == "192.0.2.7"
    assert known_address(options("x"), [LaunchHost("localhost", 1), B]) is None  # others do not reach it so
    assert known_address(options("x"), [LaunchHost("no-such-host.invalid", 1), B]) is None


def test_torchs_words_on_a_rank_that_ended_are_understood() -> None:
    """As torch 2.13 has them: tests/launcher/test_hosts.py reads real ones."""
    words = "E1122 api.py:1003] failed (exitcode: -9) local_rank: 1 (pid: 17) of binary: /opt/python"
    found = RANK_ENDED.search(words)
    assert found and found.groups() == ("-9", "1", "17")


# ------------------------------------------------------------------------------------------------ one node


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--nnodes", "4", "--node-rank", "3", "--nproc-per-node", "8"], {}, (8, 4, 3)),
        (["--nproc-per-node", "2"], {}, (2, 1, 0)),
        (["--nproc-per-node", "2"], {"SLURM_NNODES": "3", "SLURM_NODEID": "2"}, (2, 3, 2)),
        (["--nproc-per-node", "2", "--nnodes", "2"], {"JOB_COMPLETION_INDEX": "1"}, (2, 2, 1)),
    ],
)
def test_which_node_this_is(
    words: list[str], environment: dict[str, str], expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    host, num_nodes, node_rank = this_node(parse(["--no-ssh", "x.yaml", *words], ""))
    assert (host.slots, num_nodes, node_rank) == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nnodes", "2", "--nproc-per-node", "1"], "which of the 2 nodes is this? Give --node-rank, or one of SLURM"),
        (["--nnodes", "2", "--node-rank", "2", "--nproc-per-node", "1"], "--node-rank 2: nodes are numbered from 0"),
        (["--node-rank", "0"], "--nproc-per-node, the ranks of a node, is missing, and no GPUs are found to count"),
    ],
)
def test_a_node_that_is_not_known(words: list[str], told: str) -> None:
    with pytest.raises(LaunchError) as error:
        this_node(parse(["--no-ssh", "x.yaml", *words], ""))
    assert told in str(error.value)


# ------------------------------------------------------------------------------------------------ comparisons


def facts(gpus: int = 0, gpu: str = "H100, 81559 MiB", revision: str = "", **alike: str) -> dict[str, object]:
    return {"alike": alike, "gpus": [gpu] * gpus, "revision": revision}


def test_what_differs_is_told_with_hosts() -> None:
    found = {
        A: facts(torch="2.13.0", Python="3.11.7"),
        B: facts(torch="2.13.0", Python="3.11.7"),
        C: facts(torch="2.11"),
    }
    assert differences(found) == [
        "torch differs: 2.13.0 on a, b; 2.11 on c",
        "Python differs: 3.11.7 on a, b; none on c",
    ]
    code = "the code of hybridflow"
    found = {A: facts(revision="1f2e", **{code: "x"}), B: facts(revision="1f2e-dirty", **{code: "y"})}
    assert differences(found) == [like("the code of hybridflow differs: x (git 1f2e) on a; y (git 1f2e-dirty) on b")]
    assert differences({A: facts(revision="1", **{code: "x"}), B: facts(**{code: "x"})}) == []


def test_what_nobody_has() -> None:
    found = {A: facts(torch="none", vllm="1"), B: facts(torch="none", vllm="none")}
    assert missing(found, "/py", ["torch", "vllm"]) == [
        like("torch is not installed for /py: `bash launch/setup.sh` installs it")
    ]


def test_gpus() -> None:
    found = {A: facts(8), B: facts(8, "A100, 40960 MiB"), C: facts()}
    assert unlike_gpus(found) == [
        like(
            "GPUs differ: 8 x H100, 81559 MiB on a; 8 x A100, 40960 MiB on b; none on c; --allow-unlike-gpus "
            "starts all "
            "the same"
        )
    ]
    assert unlike_gpus({A: facts(8), B: facts(8)}) == []
    assert too_few_gpus({A: facts(4), B: facts(8), C: facts()}) == [
        "a: slots=8, but it has 4 GPUs: each rank needs its own"
    ]


# ------------------------------------------------------------------------------------------------ logs


def test_logs_move_into_the_run_that_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier run of the name is moved away meanwhile, as hybridflow does it."""
    monkeypatch.setattr("hybridflow.launcher.output.LOOK_EVERY", 0.0)
    earlier = tmp_path / "x"
    earlier.mkdir()
    (earlier / "config.yaml").write_text("old")
    output = Output([A, B], earlier, stays=False)
    output.line("a", "out", "first")
    assert not (earlier / "logs").exists()
    earlier.rename(tmp_path / "x.1")
    earlier.mkdir()
    (earlier / "config.yaml").write_text("new")
    output.line("a", "out", "second")
    assert (earlier / "logs" / "a.log").read_text() == "first\nsecond\n"
    output.line("b", "err", "third")
    output.close()
    assert (earlier / "logs" / "b.log").read_text() == "third\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.1"]


def test_logs_of_a_run_that_goes_on_are_continued(tmp_path: Path) -> None:
    for text in ("first", "second"):
        output = Output([A], tmp_path / "x", stays=True)
        output.line("a", "out", text)
        assert output.path("a") == tmp_path / "x" / "logs" / "a.log"
        output.close()
    assert (tmp_path / "x" / "logs" / "a.log").read_text() == "first\nsecond\n"


def test_logs_of_a_start_that_failed_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output([A], tmp_path / "new" / "x", stays=False)
    output.line("a", "out", "it fails")
    output.close()
    assert (tmp_path / "new" / "x" / "logs" / "a.log").read_text() == "it fails\n"
    assert capsys.readouterr().out == "a: it fails\n"


# ------------------------------------------------------------------------------------------------ the whole command


@pytest.mark.slow
def test_a_dry_run_prints_commands_and_grids_and_asks_nobody(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("192.0.2.1 slots=8\nroot@192.0.2.2 slots=8 port=2200\n192.0.2.3 slots=8\n")
    config, fits = ROOT / "configs" / "llama3_8b_8gpus.yaml", ["actor.data_parallel_size=4", "environment={HF_X: a b}"]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = run("--hostfile", "hosts", "--dry-run", "--nnodes", 2, config, *fits, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["host", "ranks", "actor"] and "192.0.2.3" not in done.stdout
    assert "ssh -T -x -a" in done.stdout and "-p 2200 -- root@192.0.2.2 'exec " in done.stdout
    assert "HF_X='a b'" in done.stdout and "--nnodes 2 --node-rank 1 --nproc-per-node 8" in done.stdout
    assert "--master-addr 192.0.2.1 --master-port 29500" in done.stdout
    assert "Where port 29500 of 192.0.2.1 is taken" in done.stdout


@pytest.mark.slow
def test_common_mistakes_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=two\n")
    done = run("--hostfile", "hosts", "x.yaml", cwd=tmp_path)
    assert done.stderr == like("launch: error: hosts, line 2: 'slots=two': 'two' is no whole number from 1 to 4096\n")
    assert done.returncode == 1
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    done = run("--hostfile", "hosts", "--nnodes", 3, "x.yaml", cwd=tmp_path)
    assert done.stderr == like("launch: error: --nnodes asks for 3 hosts, hosts and the filters leave 2: a, b\n")
    done = run("--hostfile", "hosts", "none.yaml", cwd=tmp_path)
    assert done.stderr == like("launch: error: none.yaml: cannot be read: No such file or directory\n")
    done = run("x.yaml", cwd=tmp_path)
    assert done.stderr.startswith("launch: error: --hostfile names the hosts; --no-ssh starts this node's ranks")


# ------------------------------------------------------------------------------------------------ the master's name


def test_a_name_that_comes_late_is_waited_for_and_one_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def getaddrinfo(name: str, port: None) -> None:
        asked.append(name)
        if name == "never" or len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    wait_for_name("late", 1, 60.0)
    assert asked == ["late"] * 3
    with pytest.raises(LaunchError, match="the first host's name never does not resolve within 0 s"):
        wait_for_name("never", 1, 0.0)
