"""launch/run.py on several hosts, each with its own sshd: what it refuses, what it trains, and how it ends.

Where a rank, torchrun or the launcher is killed, a link cut or a scheduler starts the nodes, the ranks are those of
tests/launcher/idle; a run on two hosts, one on three, one that is stopped and one that loses a host are real.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.forks import ROOT
from tests.launch import run_ranks
from tests.launcher.jobs import Job, kill, wait_until
from tests.launcher.network import Network, network
from tests.messages import like

pytestmark = pytest.mark.distributed
thorough = pytest.mark.thorough

NOT_COMPARED = ("time/", "speed/", "memory/", "tokens_per_sec", "_ms", "idle_fraction", "seconds", "throughput")
IDLE = ROOT / "tests" / "launcher" / "idle"  # on Python's path: ranks that only wait
ENDED = 30.0  # seconds from a failure to the end of all others, as the launcher promises


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a config of two iterations and more, beside its inputs."""
    directory = tmp_path_factory.mktemp("hosts")
    config = json.loads(write_config(directory / "config.yaml", make_inputs(directory / "inputs")).read_text())
    config["actor"]["tensor_parallel_size"] = 1
    config |= {"output_dir": ".", "platform": "cpu", "data": config["data"] | {"prompts_per_iteration": 6}}
    config["algorithm"]["update"]["mini_batch_size"] = 6
    config["checkpoint"] = {"grace_seconds": 20.0}
    (directory / "config.yaml").write_text(json.dumps(config))
    (directory / "told.py").write_text(TOLD)
    return directory


TOLD = """
import json, os
def reward(prompts, responses, columns):
    if "HYBRIDFLOW_HOST" in os.environ:
        with open(f"told_{os.environ['RANK']}.json", "w") as file:
            json.dump(dict(os.environ), file)
    return [len(response) / 8 for response in responses]
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


def job(net: Network, directory: Path, name: str, *arguments: object, slots: int = 1, hostfile: str = "") -> Job:
    """In a directory of its own, which has the inputs of `directory`."""
    own = directory / name
    own.mkdir()
    for file in ("config.yaml", "inputs", "told.py"):
        (own / file).symlink_to(directory / file)
    return Job(net, own, *arguments, slots=slots, hostfile=hostfile)


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    compared = [name for name in rows[0] if not any(part in name for part in NOT_COMPARED)]
    return [{name: row[name] for name in compared} for row in rows]


STAGED = "reshard/peak_extra_bytes"  # messages between hosts are packed, where ranks of one read what they need


def assert_same(rows: list[dict[str, str]], others: list[dict[str, str]]) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if value and name != STAGED:
                assert float(value) == pytest.approx(float(other[name]), rel=1e-5, abs=1e-6), name


# ------------------------------------------------------------------------------------------------ it trains


@pytest.mark.thorough
def test_pipelines_and_engines_on_two_hosts_equal_one_host(net: Network, directory: Path) -> None:
    """Stages of the actor lie on two hosts, and so do the ranks of an engine replica where the config allows it.

    Each host's own name stands for 127.0.1.1, as Debian has it. The environment arrives unchanged, by --env and by the
    config, over ssh and through torchrun; what nobody names stays behind.
    """
    names_stand_for_loopback(net)
    across = ["rollout.tensor_parallel_size=2", "rollout.pipeline_parallel_size=1", "actor.pipeline_parallel_size=2"]
    refused = job(net, directory, "refused", "config.yaml", *across, hostfile="node-a slots=1\nnode-b slots=1\n")
    assert refused.wait() == 1
    assert (
        "rollout.tensor_parallel_size = 2: ranks 0-1 lie on node-a and node-b (node-a has 0, node-b has 1): a "
        "tensor-parallel group stays on one host. Set rollout.tensor_parallel_size=1, or "
        "tensor_parallel_across_hosts=true"
    ) in refused.said
    odd = "two words\n'single' \"double\" $HOME `id` \\ ; | & * ~ é\t!"
    environment = {"HF_ODD": odd, "NCCL_NUMBER": 7}
    allowed = [*across, "tensor_parallel_across_hosts=true", "name=across", f"environment={json.dumps(environment)}"]
    allowed.append("reward.functions=[{function: told:reward}]")
    hostfile = "node-a slots=1\nnode-c slots=1\n"
    started = job(net, directory, "across", "--env", f"ODD={odd}", "config.yaml", *allowed, hostfile=hostfile)
    assert started.wait() == 0, started.said
    run_ranks(2, "hybridflow.train", directory / "config.yaml", *allowed, f"output_dir={directory / 'one_host'}")
    assert_same(metrics(started.directory / "across"), metrics(directory / "one_host" / "across"))
    told = [json.loads(file.read_text()) for file in sorted(started.directory.glob("told_*.json"))]
    assert len(told) == 2
    for each in told:
        assert (each["ODD"], each["HF_ODD"], each["NCCL_NUMBER"]) == (odd, odd, "7")
        assert each["HYBRIDFLOW_HOSTS"] == "node-a=1,node-c=1" and each["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "PYTEST_CURRENT_TEST" not in each


def test_hosts_whose_names_stand_for_loopback_find_each_other_without_our_launcher(net: Network) -> None:
    """By the address that reaches the master, of which each host is told; the second time by its name."""
    names_stand_for_loopback(net)
    here = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    first = net.hosts[0]
    for port, master in ((29611, first.address), (29612, first.name)):
        ranks = []
        for rank, host in enumerate(net.hosts[:2]):
            address = master if rank else first.address  # the first's own name is 127.0.1.1, where nobody listens
            own = {"PATH": os.environ["PATH"], "RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            command = [sys.executable, "-m", "tests.launcher.gloo_worker"]
            ranks.append(net.run(host, command, cwd=ROOT, env=here | own, stdout=-1, stderr=-2, text=True))
        said = [rank.communicate(timeout=180)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
        assert all(f"rank {rank}: 3" in text for rank, text in enumerate(said)), said


def names_stand_for_loopback(net: Network) -> None:
    for host in net.hosts:
        others = "".join(f"{each.address} {each.name}\n" for each in net.hosts if each is not host)
        (own := net.directory / f"hosts_of_{host.name}").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}"
        )
        net.mount(host, own, Path("/etc/hosts"))


@thorough
def test_six_ranks_on_three_hosts_equal_one_host(net: Network, directory: Path) -> None:
    """The actor is cut in two on each host; its data-parallel groups lie across the hosts."""
    overrides = ["actor.tensor_parallel_size=2", "name=six"]
    started = job(net, directory, "six", "config.yaml", *overrides, slots=2)
    assert started.wait() == 0, started.said
    run = started.directory / "six"
    assert "node-a: six: loading" in started.said and started.left() == {}
    assert re.search(r"launch: node-c +4-5 +tp 0-1 dp 2 pp 0", started.said), started.said
    logs = {host.name: (run / "logs" / f"{host.name}.log").read_text() for host in net.hosts}
    assert "iteration 2/2" in logs["node-a"] and "iteration" not in logs["node-b"]
    run_ranks(6, "hybridflow.train", directory / "config.yaml", *overrides, f"output_dir={directory / 'one_host'}")
    assert_same(metrics(run), metrics(directory / "one_host" / "six"))


@thorough
def test_a_scheduler_starts_each_node(net: Network, directory: Path) -> None:
    """--no-ssh on two nodes. One that does not reach the first ends, and says what it tried."""
    own = directory / "no_ssh"
    own.mkdir()
    for file in ("config.yaml", "inputs"):
        (own / file).symlink_to(directory / file)
    here = [sys.executable, ROOT / "launch" / "run.py", "--no-ssh", "--nnodes", 2, "--nproc-per-node", 1]
    here += ["--python", sys.executable, "--env", f"PYTHONPATH={IDLE}:{ROOT}", "--master-port", 29600]
    here += ["--directory", own, "--master-addr", net.hosts[0].address]

    def node(number: int, *more: object) -> "subprocess.Popen[str]":
        command = [str(word) for word in (*here, "--node-rank", number, *more, "config.yaml")]
        return net.run(net.hosts[number], command, cwd=own, stdout=-1, stderr=-2, text=True)

    unreached = node(1, "--rdzv-timeout", 3)
    said, _ = unreached.communicate(timeout=120)
    tried = f"node 1, node-b, cannot reach the master at {net.hosts[0].address} port 29600 within 3 s: "
    assert unreached.returncode == 1 and f"launch: error: {tried}" in said
    nodes = [node(0), node(1)]
    wait_until(lambda: (own / "rank_0.json").exists() and (own / "rank_1.json").exists())
    for each in nodes:
        each.send_signal(signal.SIGTERM)
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], outputs
    for rank in "01":
        environment = json.loads((own / f"rank_{rank}.json").read_text())
        assert (environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_PORT"]) == (rank, "2", "29600")
    assert "node-a: iteration 2/100000" in outputs[0]
    assert {file.name for file in (own / "run" / "logs").iterdir()} == {"node-a.log", "node-b.log"}


# ------------------------------------------------------------------------------------------------ what it refuses


def test_hosts_that_are_not_reached_are_named_together(net: Network, directory: Path) -> None:
    """One is down, one refuses the key, one has no sshd, one name stands for nothing; nothing is started."""
    down, refuses, silent = net.hosts
    net.link_down(down)
    net.refuse_key(refuses)
    net.stop_sshd(silent)
    lines = "".join(f"{host.name} slots=1\n" for host in net.hosts) + "no-such-host slots=1\n"
    started = job(net, directory, "unreached", "--connect-timeout", 5, "config.yaml", hostfile=lines)
    assert started.wait(90) == 1
    told = {line.split(": ")[2]: line for line in started.said.splitlines() if line.startswith("launch: error: ")}
    assert re.search("timed out|No route to host", told["node-a"]), started.said
    assert "Permission denied (publickey)" in told["node-b"]
    assert "Connection refused" in told["node-c"]
    assert "Could not resolve hostname no-such-host" in told["no-such-host"]
    assert all("; try: ssh " in line for line in told.values())
    assert started.left() == {}


@thorough
def test_a_port_that_is_taken_and_a_master_that_is_not_reached(net: Network, directory: Path) -> None:
    listens = net.run(net.hosts[0], [sys.executable, "-c", LISTEN, "29777"], stdout=-1)
    assert listens.stdout and listens.stdout.readline() == b"listens\n"
    started = job(net, directory, "taken", "--master-port", 29777, "config.yaml")
    assert started.wait(120) == 1
    assert "launch: error: node-a: --master-port 29777: [Errno 98] Address already in use" in started.said
    wrong = job(net, directory, "wrong", "--master-addr", "10.77.0.99", "--rdzv-timeout", 3, "config.yaml")
    assert wrong.wait(120) == 1
    for name in ("node-a", "node-b", "node-c"):
        assert f"launch: error: {name} cannot reach the master node-a at 10.77.0.99 port " in wrong.said
    listens.kill()
    listens.wait()
    assert started.left() == {}


LISTEN = """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("listens", flush=True)
time.sleep(600)
"""


@thorough
def test_other_code_files_and_python_are_told_with_their_hosts(net: Network, directory: Path) -> None:
    """Each host has a mount of its own over the code of one package, and over the config."""
    own = directory / "unlike"
    (own / "code").mkdir(parents=True)
    (own / "code" / "errors.py").write_text((ROOT / "hybridflow" / "errors.py").read_text() + "# another\n")
    for host, file, target in (
        (net.hosts[1], own / "code" / "errors.py", ROOT / "hybridflow" / "errors.py"),
        (net.hosts[2], own / "code" / "errors.py", directory / "config.yaml"),
    ):
        net.mount(host, file, target)
    (own / "config.yaml").write_text(f"base: {directory / 'config.yaml'}\nname: run\n")
    started = Job(net, own, own / "config.yaml", f"output_dir={own}")
    assert started.wait(120) == 1
    assert re.search(
        r"error: the code of hybridflow differs: \w+ \(.*\) on node-a, node-c; \w+ .*on node-b", started.said
    )
    assert re.search(r"error: the file \S+config.yaml differs: \w+ on node-a, node-b; \w+ on node-c", started.said)
    assert not (own / "run").exists()


@thorough
def test_what_a_host_lacks_is_told(net: Network, directory: Path) -> None:
    """One does not see the Python of the ranks, another not their directory; a third's key is not known."""
    own = directory / "lacks"
    (own / "nothing").mkdir(parents=True)
    (own / "work").mkdir()
    (own / "work" / "config.yaml").write_bytes((directory / "config.yaml").read_bytes())
    net.mount(net.hosts[0], own / "nothing", Path(sys.prefix))
    net.mount(net.hosts[1], own / "nothing", own)
    known = net.directory / "known_hosts"
    known.write_text("".join(line for line in known.open() if not line.startswith(net.hosts[2].address)))
    started = Job(net, own / "work", "config.yaml")
    assert started.wait(60) == 1
    told = {line.split(": ")[2]: line for line in started.said.splitlines() if line.startswith("launch: error: ")}
    assert told["node-a"] == f"launch: error: node-a: --python {sys.executable}: is not there", started.said
    assert told["node-b"] == like(f"launch: error: node-b: --directory {own / 'work'}: No such file or directory")
    assert "Host key verification failed." in told["node-c"] and started.left() == {}


def test_slots_that_do_not_fit_are_told_before_a_host_is_asked(net: Network, directory: Path) -> None:
    for host in net.hosts:
        net.link_down(host)
    lines = "node-a slots=2\nnode-b slots=2\nnode-c slots=1\n"
    started = job(net, directory, "slots", "config.yaml", "actor.tensor_parallel_size=2", hostfile=lines)
    assert started.wait(90) == 1
    assert (
        "launch: error: 3 hosts with 2 + 2 + 1 = 5 ranks: actor: tensor_parallel_size x pipeline_parallel_size = 2 x 1 "
        "= 2 does not divide the 5 ranks of the run: 5 = 2 x 2 + 1"
    ) in started.said
    assert "reaching" not in started.said


# ------------------------------------------------------------------------------------------------ how it ends


def begun(net: Network, directory: Path, name: str, *arguments: object) -> Job:
    """A run without end on three hosts that has done an iteration."""
    started = job(net, directory, name, "--lost-after", 15, *arguments, "config.yaml", "num_iterations=100000")
    started.wait_for(lambda: started.rows() > 1)
    return started


@pytest.fixture
def idle(net: Network, directory: Path, request: pytest.FixtureRequest) -> Job:
    """One whose ranks only wait."""
    started = begun(net, directory, re.sub(r"\W+", "_", request.node.name), "--env", f"PYTHONPATH={IDLE}:{ROOT}")
    started.wait_for(lambda: all(started.ranks(host) for host in net.hosts))
    return started


def last_lines(started: Job) -> str:
    return "\n".join(started.said.splitlines()[-1:])


def test_a_killed_rank(idle: Job) -> None:
    kill([idle.ranks(idle.net.hosts[1])[1]])
    began = time.monotonic()
    assert idle.wait(ENDED + 15) == 128 + signal.SIGKILL
    assert time.monotonic() - began < ENDED
    assert "launch: node-b: rank 1 was killed by SIGKILL; its output: " in last_lines(idle)
    assert "iteration 2/100000" in (idle.directory / "run" / "logs" / "node-a.log").read_text()
    assert idle.left() == {}


@thorough
def test_a_users_error_is_the_last_thing_on_the_screen(net: Network, directory: Path) -> None:
    """Behind what torchrun prints of ranks that have failed, and behind the host and rank of the first."""
    started = job(net, directory, "users_error", "config.yaml", "data.max_prompt_length=2")
    assert started.wait(120) == 1
    lines = started.said.splitlines()
    assert lines[-2].startswith("launch: node-") and " ended with status 1; its output: " in lines[-2], started.said
    assert re.search(r"^hybridflow: error: .*tokens, more than data.max_prompt_length = 2", lines[-1]), started.said


@thorough
def test_a_killed_torchrun(idle: Job) -> None:
    kill([idle.torchrun(idle.net.hosts[2])])
    began = time.monotonic()
    assert idle.wait(ENDED + 15) == 128 + signal.SIGKILL
    assert time.monotonic() - began < ENDED
    assert "launch: node-c: torchrun was killed by SIGKILL; its output: " in last_lines(idle)
    assert idle.left() == {}


@thorough
def test_a_killed_launcher_leaves_nothing_behind(idle: Job) -> None:
    """The ranks are told to end, and save."""
    kill([idle.process.pid])
    idle.process.wait()
    assert idle.left() == {}
    assert list((idle.directory / "run" / "checkpoints").glob("step_*"))


@thorough
def test_a_cut_link(idle: Job) -> None:
    host = idle.net.hosts[1]
    idle.net.link_down(host)
    assert idle.wait(90) == 1
    assert re.search(r"launch: node-b: lost: no sign of life for \d+ s; its output: ", last_lines(idle))
    assert idle.left() == {}  # also beyond the cut link, where nobody could tell them


@thorough
def test_a_run_that_is_told_to_end_is_saved_and_goes_on(net: Network, directory: Path) -> None:
    """SIGTERM; then the same command, in which a second Ctrl-C ends it without a save."""
    training = begun(net, directory, "told")
    kill([training.process.pid], signal.SIGTERM)
    assert training.wait(90) == 75, training.said[-4000:]
    assert "the run is saved, and the same command resumes" in training.said
    assert "stopped as told, saved" in last_lines(training)
    assert training.left() == {}
    rows = training.rows()
    again = Job(
        training.net, training.directory, "config.yaml", "num_iterations=100000", "checkpoint.grace_seconds=600"
    )
    again.wait_for(lambda: again.rows() > rows)
    assert "resumes from run/checkpoints/step_" in again.said
    kill([again.process.pid], signal.SIGINT)
    time.sleep(1.2)
    kill([again.process.pid], signal.SIGINT)
    assert again.wait(60) in (75, 76)
    assert again.left() == {}


@thorough
def test_a_lost_host_leaves_a_run_that_goes_on_with_the_others(net: Network, directory: Path) -> None:
    """With --nnodes 2:3 one of three goes down in the middle of an iteration: as a run that goes on by hand on two."""
    arguments = ["config.yaml", "num_iterations=14", "checkpoint.save_interval=2", "checkpoint.keep_last=14"]
    started = job(net, directory, "spare", "--lost-after", 8, "--nnodes", "2:3", *arguments)
    started.wait_for(lambda: started.rows() > 3)
    net.kill_host(net.hosts[0])  # the master
    assert started.wait() == 0, started.said
    assert re.search(r"launch: node-a: lost: .*: restart 1 of 3", started.said)
    assert "launch: 2 ranks on node-b, node-c" in started.said
    [step] = re.findall(r"resumes from run/checkpoints/step_(\d+)", started.said)
    by_hand = directory / "by_hand"
    shutil.copytree(
        started.directory / "run" / "checkpoints" / f"step_{step}", by_hand / "run" / "checkpoints" / f"step_{step}"
    )
    rows = metrics(started.directory / "run")
    run_ranks(2, "hybridflow.train", directory / "config.yaml", *arguments[1:], f"output_dir={by_hand}")
    assert_same(rows[int(step) :], metrics(by_hand / "run")[-(len(rows) - int(step)) :])
    assert started.left() == {}


# ------------------------------------------------------------------------------------------------ its health


@thorough
def test_the_health_check_names_the_slow_link(net: Network, directory: Path) -> None:
    """All links of one host are held to 1 Mbit/s; with the run's config, over ssh, in one command."""
    net.slow(net.hosts[2], "1mbit")
    report = directory / "health.json"
    started = job(net, directory, "health", "--health", "config.yaml", "--", "--json", report)
    assert started.wait(300) == 1
    lines = json.loads(report.read_text())["findings"]
    links = {line["host"]: line for line in lines if line["area"] == "links between hosts" and line["name"] == "link"}
    assert {host: line["status"] for host, line in links.items()} == {
        "node-a - node-b": "ok",
        "node-a - node-c": "fail",
        "node-b - node-c": "fail",
    }
    assert "every slow link is one of node-c" in links["node-a - node-c"]["advice"]
    assert [line for line in lines if line["status"] == "fail" and line["area"] != "links between hosts"] == []
    assert re.search(r"node-a: fail: links between hosts, link, node-a - node-c: 0\.\d+ MB/s", started.said)
    assert started.left() == {}
