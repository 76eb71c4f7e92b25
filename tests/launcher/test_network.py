"""The hosts that the launcher is tested on are hosts: they answer, can be cut off, slowed and killed, and go again."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import ROOT
from tests.launcher import network as networks
from tests.launcher.namespaces import NETNS_FILES, PATIENCE, ip, is_alive, namespaces, pids
from tests.launcher.network import INTERFACE, Host, Network, network, why_not

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

PORT = "7000"
NUM_BYTES = "200000"
# Answers each connection line by line.
ECHO = """
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile: self.wfile.write(line)
socketserver.ThreadingTCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer(("", int(sys.argv[1])), Echo)
print("listens", flush=True)
server.serve_forever()
"""
# Lines of stdin to the server, its answers to stdout.
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as peer:
    answers = peer.makefile()
    for line in sys.stdin:
        peer.sendall(line.encode())
        print(answers.readline(), end="", flush=True)
"""
# Seconds that a line of so many bytes takes there and back again.
TIMED = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as peer:
    start = time.monotonic()
    peer.sendall(b"." * (int(sys.argv[3]) - 1) + b"\\n")
    assert len(peer.makefile().readline()) == int(sys.argv[3])
    print(time.monotonic() - start)
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as made:
        yield made


def output_of(net: Network, host: Host | None, *argv: str | Path) -> str:
    process = net.run(host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    out, _ = process.communicate(timeout=60)
    return f"{process.returncode}: {out.strip()}"


def ssh(net: Network, source: Host | None, target: str, *command: str) -> str:
    return output_of(net, source, "ssh", "-o", "BatchMode=yes", "-F", net.ssh_config, target, *command)


def serve(net: Network, host: Host) -> None:
    server = net.run(host, [sys.executable, "-c", ECHO, PORT], stdout=subprocess.PIPE, text=True)
    assert server.stdout and server.stdout.readline() == "listens\n"


def round_trip(net: Network, source: Host, target: Host) -> float:
    status, _, seconds = output_of(net, source, sys.executable, "-c", TIMED, target.name, PORT, NUM_BYTES).partition(
        ": "
    )
    assert status == "0", seconds
    return float(seconds)


def test_each_host_answers_to_ssh_by_its_own_name_and_address(net: Network) -> None:
    assert [host.name for host in net.hosts] == ["node-a", "node-b", "node-c"]
    tell = f"cat /proc/sys/kernel/hostname; ip -br -4 addr show {INTERFACE}; readlink /proc/self/ns/net"
    answers = {host.name: ssh(net, None, host.name, tell).split() for host in net.hosts}
    for host in net.hosts:
        status, name, _, state, address, _ = answers[host.name]
        assert (status, name, state, address) == ("0:", host.name, "UP", f"{host.address}/24")
    assert len({answer[-1] for answer in answers.values()} | {os.readlink("/proc/self/ns/net")}) == 4
    assert ssh(net, net.hosts[0], "node-c", "true") == "0: "
    assert output_of(net, None, "cat", "/proc/sys/kernel/hostname") == "0: launcher"


def test_a_host_sees_no_process_and_no_shared_memory_of_another(net: Network) -> None:
    """hybridflow takes processes for those of one machine by what of theirs the kernel shares."""
    first, second, _ = net.hosts
    sleeper = net.run(first, ["sh", "-c", "echo $$ >/dev/shm/mine; exec sleep 1000"])
    wait_for_processes(net, first, 1)
    [number] = ssh(net, None, first.name, "cat /dev/shm/mine").split()[1:]
    assert net.pid_of(first, int(number)) == sleeper.pid and net.pid_of(second, int(number)) != sleeper.pid
    seen = {host.name: ssh(net, None, host.name, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '") for host in net.hosts}
    assert [name for name, commands in seen.items() if "sleep 1000" in commands] == [first.name]
    assert ssh(net, None, second.name, "ls /dev/shm") == "0: "
    namespaces_of_ids = {ssh(net, None, host.name, "readlink /proc/self/ns/pid") for host in net.hosts}
    assert len(namespaces_of_ids | {f"0: {os.readlink('/proc/self/ns/pid')}"}) == 4
    sleeper.terminate()
    assert sleeper.wait(PATIENCE) == -signal.SIGTERM, "the command itself, not what has started it"


def test_who_has_another_key_is_not_let_in_and_who_is_another_is_not_trusted(net: Network) -> None:
    first, second, third = net.hosts
    net.refuse_key(first)
    assert re.fullmatch(r"255: .*Permission denied \(publickey\)\.", ssh(net, None, first.name, "true"))
    net.stop_sshd(second)
    assert re.fullmatch(r"255: .*Connection refused", ssh(net, None, second.name, "true"))
    known = net.directory / "known_hosts"
    known.write_text(known.read_text().replace(third.address, "10.77.0.99"))
    assert "Host key verification failed." in ssh(net, None, third.name, "true")


def test_a_cable_that_is_pulled_stops_a_connection_until_it_is_back(net: Network) -> None:
    client_host, server_host, other = net.hosts
    serve(net, server_host)
    client = net.run(
        client_host,
        [sys.executable, "-c", TALK, server_host.name, PORT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert client.stdin and client.stdout
    os.set_blocking(client.stdout.fileno(), False)

    def answer(seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        while not (line := client.stdout.read()) and time.monotonic() < end:
            time.sleep(0.05)
        return line

    client.stdin.write(b"one\n")
    assert answer(30) == b"one\n"
    net.link_down(server_host)
    client.stdin.write(b"two\n")
    assert answer(1.5) is None
    assert ssh_in_two_seconds(net, server_host) == "255: no answer"
    assert ssh(net, None, other.name, "true") == "0: "
    net.link_up(server_host)
    assert answer(30) == b"two\n"


def ssh_in_two_seconds(net: Network, target: Host) -> str:
    told = output_of(net, None, "ssh", "-F", net.ssh_config, "-o", "ConnectTimeout=2", target.name, "true")
    return re.sub(r"ssh: connect to host \S+ port 22: (Connection timed out|No route to host)", "no answer", told)


def test_a_slow_host_is_slow_both_ways(net: Network) -> None:
    first, second, third = net.hosts
    for host in (second, third):
        serve(net, host)
    fast = round_trip(net, first, second)
    net.slow(second, "2mbit")  # 200 kB take 0.8 s, less what the bucket holds
    slow = round_trip(net, first, second)
    assert slow > 1.3 and slow > 4 * fast, f"{slow} s there and back, {fast} s before"
    assert round_trip(net, first, third) < slow / 4, "a host that nobody has slowed"


def test_a_killed_host_says_nothing_and_has_nothing(net: Network) -> None:
    first, second, third = net.hosts
    sleeper = net.run(second, ["sh", "-c", "trap '' TERM HUP; setsid sleep 1000 & sleep 1000"])
    beside = net.run(third, ["sleep", "1000"])
    session = net.run(None, ["ssh", "-F", net.ssh_config, second.name, "sleep 1000"], stderr=subprocess.DEVNULL)
    wait_for_processes(net, second, 4)  # the shell, its two, and that of the session; sshd and its own do not count
    net.kill_host(second)
    assert net.processes(second) == [] and sleeper.wait(PATIENCE) == -signal.SIGKILL
    assert session.poll() is None, "it has not been told"
    assert net.processes(third) == [beside.pid]
    assert ssh_in_two_seconds(net, second) == "255: no answer"
    assert ssh(net, first, third.name, "true") == "0: "


def wait_for_processes(net: Network, host: Host, number: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(net.processes(host)) != number:
        assert time.monotonic() < end, net.processes(host)
        time.sleep(0.05)


def test_nothing_is_left_when_the_test_has_failed(tmp_path: Path) -> None:
    before = machine_network()
    with pytest.raises(ZeroDivisionError), network(tmp_path, ("node-a",)) as net:
        there = [net.run(host, ["sleep", "1000"]).pid for host in (None, *net.hosts)]
        there += pids(net.hosts[0].namespace)
        assert {net.switch, net.launcher_namespace, net.hosts[0].namespace} <= set(namespaces())
        assert machine_network() == before, "the machine's own network is as it was meanwhile"
        raise ZeroDivisionError
    assert len(there) >= 4 and not [pid for pid in there if is_alive(pid)]
    ours = {net.switch, net.launcher_namespace, net.hosts[0].namespace}
    assert not ours & set(namespaces())
    assert not [name for name in ours if (NETNS_FILES / name).exists()]
    assert machine_network() == before


def machine_network() -> str:
    return ip("-br", "addr") + ip("route")


def test_what_a_killed_test_has_left_goes_with_the_next_network(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    program = (
        "import os, pathlib, sys; from tests.launcher.network import network\n"
        "with network(pathlib.Path(sys.argv[1]), ('node-a',)) as net:\n"
        "    pid = net.run(None, ['sleep', '1000'], stdout=-3).pid\n"
        "    print(pid, net.launcher_namespace, flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    (tmp_path / "killed").mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "killed"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    pid, namespace = killed.stdout.split()
    assert killed.returncode == -signal.SIGKILL and namespace in namespaces() and is_alive(int(pid))
    with network(tmp_path, ()):
        assert namespace not in namespaces() and not is_alive(int(pid))


def test_where_hosts_must_be_the_test_fails_instead_of_skipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "why_not", lambda: "no ip here")
    monkeypatch.setenv(networks.MUST_RUN, "1")
    with pytest.raises(AssertionError, match="HYBRIDFLOW_MUST_RUN_HOSTS=1, and no ip here"), network(tmp_path):
        pass
    monkeypatch.delenv(networks.MUST_RUN)
    with pytest.raises(pytest.skip.Exception, match="no ip here"), network(tmp_path):
        pass
