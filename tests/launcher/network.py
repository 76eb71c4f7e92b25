"""Hosts on one machine: namespaces joined by a bridge, each with its address, its host name and its own real sshd.

    with network(tmp_path, names=("node-a", "node-b")) as net:
        net.run(None, ["ssh", "-F", net.ssh_config, "node-a", "hostname"])

They share the kernel and the file system, but for /dev/shm: a process sees nobody of another host, and its own number
is another than the test sees (`pid_of`). The bridge lies in a namespace of its own, so the machine's interfaces,
addresses and routes stay as they are. Outside of tmp_path there is only what `ip netns` needs, /run/netns/NAME and
/etc/netns/NAME, and the empty directory that sshd wants; it goes again at the end. What a killed test has left goes
when the next network is made.
"""

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.namespaces import (
    NETNS_FILES,
    PATIENCE,
    CommandError,
    children_in,
    found,
    free_prefix,
    ip,
    is_sshd,
    kill_all,
    pids,
    remove,
    remove_leftovers,
    search_path,
    system,
    wait_for_end,
)
from tests.launcher.ssh_files import make_key, write_ssh_files

INTERFACE = "eth0"  # the name on every host: what GLOO_SOCKET_IFNAME has to be
COMMANDS = ("ip", "tc", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd")
MUST_RUN = "HYBRIDFLOW_MUST_RUN_HOSTS"
PRIVILEGE_SEPARATION = Path("/run/sshd")  # sshd does not start without
OWN = ("unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc")  # of each host, beside its network
# A host's first process: it names the host, inherits what is left alone, and takes all with it when it ends.
INIT = """
import pathlib, signal, subprocess, sys
pathlib.Path("/proc/sys/kernel/hostname").write_text(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then forgets whatever ends
print("up", flush=True)
while True:
    signal.pause()
"""


@dataclasses.dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """The processes that make a host: `unshare`, and its child, the first in the host's own process ids."""

    outer: "subprocess.Popen[bytes]"
    init: int


@dataclasses.dataclass(frozen=True)
class Network:
    """Made by `network`. In all methods `host` None is the launcher's namespace, where no sshd runs."""

    directory: Path
    switch: str  # the bridge's namespace
    launcher: Host
    hosts: list[Host]
    _machines: dict[str, Machine] = dataclasses.field(default_factory=dict)
    _sshd: dict[str, "subprocess.Popen[Any]"] = dataclasses.field(default_factory=dict)
    _started: list["subprocess.Popen[Any]"] = dataclasses.field(default_factory=list)

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: where each host is, which key opens it, and the key that it has to have itself."""
        return self.directory / "ssh_config"

    @property
    def launcher_namespace(self) -> str:
        return self.launcher.namespace

    def run(self, host: Host | None, argv: Sequence[str | Path], **popen: Any) -> "subprocess.Popen[Any]":
        """Start a command there; the pid, as the test sees it, is the command's own."""
        init = self._machines[(host or self.launcher).name].init
        command = [found("nsenter"), "--target", str(init), "--net", "--uts", "--ipc", "--mount", *argv]
        with children_in(init):
            process = subprocess.Popen(command, **{"env": {**os.environ, "PATH": search_path()}, **popen})
        self._started.append(process)
        return process

    def processes(self, host: Host | None) -> list[int]:
        """What lives there, by the numbers the test sees, but for its first process and all of its sshd."""
        where = host or self.launcher
        machine = self._machines[where.name]
        return [
            pid for pid in pids(where.namespace) if pid not in (machine.outer.pid, machine.init) and not is_sshd(pid)
        ]

    def pid_of(self, host: Host | None, inner: int) -> int | None:
        """As the test sees it, of a process that calls itself `inner` there; None where there is none."""
        for pid in pids((host or self.launcher).namespace):
            with contextlib.suppress(FileNotFoundError):
                if f"\t{inner}" in re.findall(r"^NSpid:.*(\t\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M):
                    return pid
        return None

    def link_down(self, host: Host) -> None:
        """Pull its cable: packets are lost both ways, and nobody is told."""
        ip("-n", self.switch, "link", "set", "dev", host.name, "down")

    def link_up(self, host: Host) -> None:
        ip("-n", self.switch, "link", "set", "dev", host.name, "up")

    def slow(self, host: Host, rate: str) -> None:
        """Bound what it receives, and what it sends, to a rate as tc(8) writes them: '1mbit'."""
        for namespace, interface in ((self.switch, host.name), (host.namespace, INTERFACE)):
            bucket = ("tbf", "rate", rate, "burst", "8kb", "latency", "400ms")
            system("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket)

    def stop_sshd(self, host: Host) -> None:
        """Refuse connections from now on; those that there are stay."""
        sshd = self._sshd.pop(host.name)
        sshd.terminate()
        sshd.wait(PATIENCE)

    def refuse_key(self, host: Host) -> None:
        """Let in nobody from now on who has the client's key."""
        authorized = self.directory / host.name / "authorized_keys"
        authorized.write_text(make_key(self.directory / host.name / "another_client_key"))

    def kill_host(self, host: Host) -> None:
        """As when its power fails: first the network, so that no process can say farewell, then all processes."""
        self.link_down(host)
        kill_all(host.namespace)
        self._sshd.pop(host.name, None)

    def mount(self, host: Host, file: Path, over: Path) -> None:
        """Let this host, and no other, see a file in the place of another."""
        assert self.run(host, ["mount", "--bind", file, over]).wait(PATIENCE) == 0, f"{file} over {over}"

    def boot(self, host: Host) -> None:
        command = [found("ip"), "netns", "exec", host.namespace, *OWN, sys.executable, "-S", "-c", INIT, host.name]
        outer = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self._started.append(outer)
        assert outer.stdout and outer.stdout.readline() == b"up\n", f"{host.name}: {outer.wait(PATIENCE)}"
        [init] = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        self._machines[host.name] = Machine(outer, int(init))

    def start_sshd(self, host: Host) -> None:
        directory = self.directory / host.name
        log = directory / "sshd.log"
        command = [found("sshd"), "-D", "-e", "-f", directory / "sshd_config"]
        with log.open("wb") as output:
            self._sshd[host.name] = self.run(host, command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + PATIENCE
        while b"Server listening on" not in log.read_bytes():
            ended = self._sshd[host.name].poll()
            assert ended is None and time.monotonic() < deadline, f"sshd of {host.name}: {ended}\n{log.read_text()}"
            time.sleep(0.02)

    def close(self) -> None:
        """End every process there, and remove all but the files of the directory."""
        with contextlib.ExitStack() as last_first:  # each of these, whatever becomes of the others
            for machine in self._machines.values():
                last_first.callback(wait_for_end, machine.init)
            for process in self._started:
                last_first.callback(process.wait, PATIENCE)
            for namespace in (self.switch, self.launcher_namespace, *(host.namespace for host in self.hosts)):
                last_first.callback(remove, namespace)


@contextlib.contextmanager
def network(tmp_path: Path, names: Sequence[str] = ("node-a", "node-b", "node-c")) -> Iterator[Network]:
    """Hosts of these names (of at most 15 letters), up and answering to ssh, until the block ends.

    Where there can be none the test is skipped and says why; where HYBRIDFLOW_MUST_RUN_HOSTS is 1 it fails.
    """
    if reason := why_not():
        assert os.environ.get(MUST_RUN) != "1", f"{MUST_RUN}=1, and {reason}"
        pytest.skip(reason)
    remove_leftovers()
    prefix = free_prefix()
    hosts = [Host(name, f"10.77.0.{number}", prefix + name) for number, name in enumerate(("launcher", *names), 1)]
    net = Network(tmp_path / "network", prefix + "switch", hosts[0], hosts[1:])
    made_by_us = not PRIVILEGE_SEPARATION.exists()
    try:
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        lay_cables(net.switch, hosts)
        write_ssh_files(net.directory, [(host.name, host.address) for host in net.hosts])
        for host in hosts:
            net.boot(host)
        for host in net.hosts:
            net.start_sshd(host)
        yield net
    finally:
        net.close()
        if made_by_us:
            with contextlib.suppress(OSError):  # in use again, or gone: another test's
                PRIVILEGE_SEPARATION.rmdir()


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return f"network namespaces are made by root; the tests run as user {os.geteuid()}"
    if missing := [command for command in COMMANDS if shutil.which(command, path=search_path()) is None]:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, openssh-client, openssh-server, util-linux)"
    trial = f"hf-{os.getpid()}-trial"
    try:
        ip("netns", "add", trial)
        ip("-n", trial, "link", "add", "name", "br0", "type", "bridge")
        ip("-n", trial, "link", "add", "name", "end0", "type", "veth", "peer", "name", "end1")
        ip("netns", "exec", trial, *OWN, "true")
        system("tc", "-n", trial, "qdisc", "add", "dev", "end0", *"root tbf rate 1mbit burst 8kb latency 400ms".split())
    except CommandError as error:
        return f"no network namespaces here: {error}"
    finally:
        remove(trial)
    return None


def lay_cables(switch: str, hosts: Iterable[Host]) -> None:
    """A namespace for each host, one for the bridge that joins them, and files that hosts see in place of /etc's."""
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
    ip("-n", switch, "link", "set", "dev", "br0", "up")
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    for host in hosts:
        files = NETNS_FILES / host.namespace
        files.mkdir(parents=True)
        (files / "hosts").write_text("\n".join(lines) + "\n")
        (files / "shadow").write_text(
            "root:*:20000:0:99999:7:::\n"
        )  # without PAM, sshd lets nobody in who is locked: !
        inside = ("-n", host.namespace)
        ip("netns", "add", host.namespace)
        ip(*inside, "link", "add", "name", INTERFACE, "type", "veth", "peer", "name", host.name, "netns", switch)
        ip("-n", switch, "link", "set", "dev", host.name, "master", "br0", "up")
        ip(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            ip(*inside, "link", "set", "dev", interface, "up")
