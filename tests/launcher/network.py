"""Hosts on one machine: network namespaces on a bridge, each with its address, its host name and its own real sshd.

    with network(tmp_path, names=("node-a", "node-b")) as net:
        net.run(None, ["ssh", "-F", net.ssh_config, "node-a", "hostname"])

They share the file system and the process ids, nothing of the network. The bridge lies in a namespace of its own, so
the machine's interfaces, addresses and routes stay as they are. Outside of tmp_path there is only what `ip netns`
needs, /run/netns/NAME and /etc/netns/NAME, and the empty directory that sshd wants; it goes again at the end. What a
killed test has left goes when the next network is made.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "eth0"  # the name in every namespace: what GLOO_SOCKET_IFNAME has to be
COMMANDS = ("ip", "tc", "unshare", "ssh", "ssh-keygen", "sshd")
MUST_RUN = "HYBRIDFLOW_MUST_RUN_HOSTS"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # sshd, ip and tc are not in every PATH
NETNS_FILES = Path("/etc/netns")
PRIVILEGE_SEPARATION = Path("/run/sshd")  # sshd does not start without
PATIENCE = 20.0  # seconds for a daemon to start or a process to end
# Its own host name for what it starts: what a process calls itself has to resolve, as it does on a real host.
NAMED = ("unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"')


class CommandError(Exception):
    """A command of the system's has failed; the text is the command and what it said."""


@dataclasses.dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str


@dataclasses.dataclass(frozen=True)
class Network:
    """Made by `network`. In all methods `host` None is the launcher's namespace, where no sshd runs."""

    directory: Path
    switch: str  # the bridge's namespace
    launcher: Host
    hosts: list[Host]
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
        """Start a command there; the pid is the command's own."""
        where = host or self.launcher
        command = [found("ip"), "netns", "exec", where.namespace, *NAMED, where.name, *argv]
        self._started.append(subprocess.Popen(command, **{"env": {**os.environ, "PATH": search_path()}, **popen}))
        return self._started[-1]

    def processes(self, host: Host | None) -> list[int]:
        """What lives there, but for its sshd and those that sshd has for each connection."""
        return [pid for pid in pids(host.namespace if host else self.launcher_namespace) if not is_sshd(pid)]

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
        authorized.write_text(f"{make_key(self.directory / host.name / 'another_client_key')}\n")

    def kill_host(self, host: Host) -> None:
        """As when its power fails: first the network, so that no process can say farewell, then all processes."""
        self.link_down(host)
        kill_all(host.namespace)
        self._sshd.pop(host.name, None)

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
        with contextlib.ExitStack() as stack:  # each of these, whatever becomes of the others
            for process in self._started:
                stack.callback(process.wait, PATIENCE)
            for namespace in (self.switch, self.launcher_namespace, *(host.namespace for host in self.hosts)):
                stack.callback(remove, namespace)


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
        write_ssh_files(net)
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
        system("tc", "-n", trial, "qdisc", "add", "dev", "end0", *"root tbf rate 1mbit burst 8kb latency 400ms".split())
    except CommandError as error:
        return f"no network namespaces here: {error}"
    finally:
        remove(trial)
    return None


def lay_cables(switch: str, hosts: Iterable[Host]) -> None:
    """A namespace for each host, and one for the bridge that joins them; all names in each one's /etc/hosts."""
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
    ip("-n", switch, "link", "set", "dev", "br0", "up")
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    for host in hosts:
        files = NETNS_FILES / host.namespace
        files.mkdir(parents=True)
        (files / "hosts").write_text("\n".join(lines) + "\n")
        inside = ("-n", host.namespace)
        ip("netns", "add", host.namespace)
        ip(*inside, "link", "add", "name", INTERFACE, "type", "veth", "peer", "name", host.name, "netns", switch)
        ip("-n", switch, "link", "set", "dev", host.name, "master", "br0", "up")
        ip(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            ip(*inside, "link", "set", "dev", interface, "up")


def write_ssh_files(net: Network) -> None:
    """Keys, sshd's config for each host, and the client's files, which know the hosts' keys."""
    net.directory.mkdir()
    client = make_key(net.directory / "client_key")
    known, blocks = [], []
    for host in net.hosts:
        directory = net.directory / host.name
        directory.mkdir()
        known.append(f"{host.address} {make_key(directory / 'host_key')}\n")
        (directory / "authorized_keys").write_text(f"{client}\n")
        (directory / "sshd_config").write_text(SSHD_CONFIG.format(directory=directory))
        blocks.append(f"Host {host.name}\n    HostName {host.address}\n")
    (net.directory / "known_hosts").write_text("".join(known))
    net.ssh_config.write_text("".join(blocks) + SSH_CONFIG.format(directory=net.directory))


# Nothing of the system's: neither its keys, nor its accounts' own files, nor PAM.
SSHD_CONFIG = """\
Port 22
AddressFamily inet
HostKey "{directory}/host_key"
AuthorizedKeysFile "{directory}/authorized_keys"
PidFile "{directory}/sshd.pid"
AllowUsers root
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
"""
SSH_CONFIG = """\
Host *
    User root
    Port 22
    IdentityFile "{directory}/client_key"
    IdentitiesOnly yes
    UserKnownHostsFile "{directory}/known_hosts"
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


def make_key(path: Path) -> str:
    """A new key pair; returns the public one."""
    system("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))
    return path.with_name(path.name + ".pub").read_text().strip()


# ------------------------------------------------------------------------------------------------ namespaces


def free_prefix() -> str:
    """Of namespaces that are not there yet. The pid in it tells `remove_leftovers` whose they are."""
    there = namespaces()
    prefixes = (f"hf-{os.getpid()}-{count}-" for count in itertools.count())
    return next(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in there))


def namespaces() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def remove_leftovers() -> None:
    """Of tests that were killed: of processes that are no more."""
    for namespace in namespaces():
        maker = re.match(r"hf-(\d+)-", namespace)
        if maker and not Path(f"/proc/{maker[1]}").exists():
            remove(namespace)


def remove(namespace: str) -> None:
    """Whatever there is of it. A name that is not there is none to remove: another test may have been quicker."""
    if namespace in namespaces():
        kill_all(namespace)
        subprocess.run([found("ip"), "netns", "del", namespace], capture_output=True)
    shutil.rmtree(NETNS_FILES / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):  # there are others, or none ever was
        NETNS_FILES.rmdir()


def kill_all(namespace: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := pids(namespace):
        assert time.monotonic() < deadline, f"{namespace}: {left} live on after SIGKILL"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def pids(namespace: str) -> list[int]:
    """Of the living: what has ended and waits to be asked for its status is in no namespace any more."""
    done = subprocess.run([found("ip"), "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def is_sshd(pid: int) -> bool:
    """Also those of its connections, which newer releases call sshd-session."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("sshd")
    except FileNotFoundError:  # it has ended
        return True


def ip(*arguments: str) -> str:
    return system("ip", *arguments)


def system(command: str, *arguments: str) -> str:
    done = subprocess.run([found(command), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError(f"{command} {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def found(command: str) -> str:
    """Its whole path, as sshd wants it. Errors: AssertionError where it is not installed."""
    path = shutil.which(command, path=search_path())
    assert path, f"{command} is not installed"
    return path


def search_path() -> str:
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
