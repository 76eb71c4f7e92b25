"""The launcher's lines to hosts: ssh, or a process where the host is this machine, with node.py at the end.

No word of a hostfile, a config or the environment is part of what a shell reads: the command that ssh hands to the
host's shell is fixed but for the path of Python, which is quoted, and all else goes through stdin.

`Team` has the lines to all hosts of a job: it asks them together, and notes which are lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import IO, Any, TypeVar

from hybridflow.launcher.hostfile import LaunchHost

PROGRAM = Path(__file__).with_name("node.py")
BOOT = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
# of the launcher's environment, for ranks on the launcher's machine: ssh would give the same variables
KEPT = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")

Message = dict[str, Any]
Events = queue.Queue[tuple["Connection", Message]]


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached. seconds: to connect, at most. options: as `-o` takes them."""

    seconds: float = 15.0
    config: str | None = None
    options: tuple[str, ...] = ()

    def command(self, host: LaunchHost, remote: str) -> list[str]:
        """ssh never asks for anything, and notices within half a minute that a host is gone."""
        settings = [f"ConnectTimeout={max(1, round(self.seconds))}", "BatchMode=yes"]
        settings += ["ServerAliveInterval=5", "ServerAliveCountMax=5", *self.options]
        command = ["ssh", "-T", "-x", "-a"]
        command += ["-F", self.config] if self.config else []
        command += [word for setting in settings for word in ("-o", setting)]
        command += ["-p", str(host.port)] if host.port else []
        return [*command, "--", host.target, remote]


def is_local(host: LaunchHost) -> bool:
    """Whether the name stands for this machine: an address of it can be bound to."""
    if host.user or host.port:
        return False  # ssh was asked for
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)
                return True
    return False


def command_of(host: LaunchHost, python: str, ssh: Ssh | None) -> list[str]:
    """What is started on this machine. ssh: None for a process here."""
    if ssh is None:
        return [python, "-u", "-c", BOOT]
    return ssh.command(host, f"exec {shlex.quote(python)} -u -c {shlex.quote(BOOT)}")


class Connection:
    """To one host; it is open until `close`. What comes is put into `events`."""

    def __init__(
        self, host: LaunchHost, python: str, ssh: Ssh | None, events: Events, *, whole_environment: bool = False
    ) -> None:
        self.host, self.is_local = host, ssh is None
        self.lost: str | None = None  # why, where the line is no more
        self.heard = time.monotonic()
        self._events, self._said, self._writing = events, list[str](), threading.Lock()
        environment = None
        if ssh is None and not whole_environment:
            environment = {name: value for name, value in os.environ.items() if name in KEPT}
        # a new session: a Ctrl-C at the terminal is for the launcher alone
        self._process: subprocess.Popen[bytes] = subprocess.Popen(
            command_of(host, python, ssh), env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        program = PROGRAM.read_bytes()
        self._write(f"{len(program)}\n".encode() + program)
        self._errors = threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True)
        self._errors.start()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def send(self, **message: object) -> None:
        """Does nothing where the line is gone: the end of the line is an event."""
        self._write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """The other end kills what is left, and ends."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """For the other end; then it is left to itself, which ends it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.give_up()

    def give_up(self) -> None:
        """Nothing more is heard of this host."""
        self._process.kill()

    def _write(self, data: bytes) -> None:
        with self._writing, contextlib.suppress(OSError, ValueError):  # it is closed, here or there
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.heard = time.monotonic()
            self._events.put((self, _message(line)))
        status = self._process.wait()
        self._errors.join(2)
        said = " ".join(self._said[-3:]) or f"it ended with status {status}"
        self._events.put((self, {"closed": said}))

    def _read_errors(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._said.append(line.decode(errors="replace").strip())


def _message(line: bytes) -> Message:
    """What the other end says; a start file of the user's shell may print something before it."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return {"err": line.decode(errors="replace").rstrip()}


def closed(connections: Sequence[Connection], seconds: float = 10.0) -> None:
    """Close all, and wait for their ends together."""
    until = time.monotonic() + seconds
    for connection in connections:
        connection.close()
    for connection in connections:
        connection.wait(max(0.1, until - time.monotonic()))


PING_EVERY = 3.0  # seconds
T = TypeVar("T")


class Team:
    """A context: the end closes every connection, and then nothing is left at the other ends.

    lost_after: seconds without a sign of life after which a host is lost, and after which a host ends the host's ranks.
    """

    def __init__(
        self, hosts: Sequence[LaunchHost], python: str, ssh: Ssh, *, lost_after: float, whole_environment: bool = False
    ) -> None:
        self.events: Events = queue.Queue()
        self._lost_after = lost_after
        self.connections = [
            Connection(host, python, None if is_local(host) else ssh, self.events, whole_environment=whole_environment)
            for host in hosts
        ]
        threading.Thread(target=self._ping, daemon=True).start()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed([connection for connection in self.connections if connection.lost is None])

    @property
    def usable(self) -> list[Connection]:
        return [connection for connection in self.connections if connection.lost is None]

    def next_events(self, seconds: float) -> Iterator[tuple[Connection, Message]]:
        """What hosts say within so long, the loss of one as {"closed": why}, once."""
        with contextlib.suppress(queue.Empty):
            connection, message = self.events.get(timeout=seconds)
            if "closed" not in message:
                yield connection, message
            elif connection.lost is None:
                connection.lost = message["closed"]
                yield connection, message
        for connection in self.usable:
            silent = time.monotonic() - connection.heard
            if silent > self._lost_after:
                connection.lost = f"no sign of life for {silent:.0f} s"
                connection.give_up()
                yield connection, {"closed": connection.lost}

    def ask(
        self, requests: Mapping[Connection, Message], answer: str, seconds: float
    ) -> tuple[dict[Connection, Any], dict[Connection, str]]:
        """What each of these hosts answers, under that key, and why others do not, in the order of the requests."""
        answers: dict[Connection, Any] = {}
        failures = {connection: connection.lost for connection in requests if connection.lost is not None}
        for connection, request in requests.items():
            connection.send(**request)
        until = time.monotonic() + seconds
        while waiting := requests.keys() - answers.keys() - failures.keys():
            for connection, message in self.next_events(0.2):
                for key, found in ((answer, answers), ("error", failures), ("closed", failures)):
                    if key in message and connection in waiting:
                        found[connection] = message[key]
            if time.monotonic() > until:
                failures |= dict.fromkeys(
                    requests.keys() - answers.keys() - failures.keys(), f"no answer in {seconds:g} s"
                )
        return _in_order(requests, answers), _in_order(requests, failures)

    def _ping(self) -> None:
        while True:
            time.sleep(PING_EVERY)
            for connection in self.usable:
                connection.send(do="alive")


def _in_order(order: Iterable[Connection], found: Mapping[Connection, T]) -> dict[Connection, T]:
    """Whichever was found first."""
    return {connection: found[connection] for connection in order if connection in found}
