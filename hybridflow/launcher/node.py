"""What runs on each host: it tells about the host, starts torchrun, and leaves no process behind when it ends.

The launcher (job.py) sends this file over ssh to the host's Python, so it imports nothing but the standard
library. Requests come in on stdin and answers go out on stdout, a JSON object a line each:

    {"do": "facts", "directory", "code", "files", "lost_after"}  -> {"facts": {...}}
    {"do": "listen", "port", "token"}                            -> {"listening": port}
    {"do": "reach", "address", "port", "token", "seconds"}       -> {"reached": network interface}
    {"do": "start", "argv", "env", "directory", "grace"}         -> {"started": pid}, {"out": line} and {"err": line},
                                                                    and in the end {"ended": status, "left": pids}
    {"do": "signal", "number"}      to every rank, also to those that start after it; once more where it comes again
    {"do": "kill"}                  every process that came of torchrun
    {"do": "alive"}                 nothing: the launcher is there

and {"error": text} where a request fails. {"alive": true} goes out by itself. Where the launcher is gone (stdin ends,
or it has said nothing for `lost_after` seconds) the ranks get SIGTERM, `grace` seconds, and then SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SIOCGIFADDR = 0x8915  # linux/sockios.h
ALIVE_EVERY = 3.0  # seconds
TICK = 0.2  # seconds between two looks at the processes
END_SECONDS = 5.0  # for a torchrun without ranks to end: while it waits for other nodes it does not hear signals
KILL_SECONDS = 20.0  # until a killed process is gone; one in an uninterruptible wait may stay
LIBC = ctypes.CDLL(None)  # loaded before any fork
PACKAGES = ("torch", "megatron-core", "vllm", "transformers")
GPUS = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")

Message = dict[str, Any]


class Node:
    """The main thread does what is asked, one request after the other; threads read and write."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._signalled: dict[int, set[int]] = {}  # signal number -> pids that have got it
        self._had_ranks = False  # since torchrun was started, as far as has been looked
        self._sent_to_torchrun = 0  # the signal that it got in their place
        self._ends_at = float("inf")  # by time.monotonic, when it has not ended by that
        self._lost_after, self._grace = 30.0, 300.0
        self._heard = time.monotonic()

    def serve(self) -> None:
        for act in (self._read, self._write, self._tell_alive):
            threading.Thread(target=act, daemon=True).start()
        while True:
            request = self._next_request()
            if request is None:
                break
            try:
                self._do(request)
            except (OSError, ValueError) as error:
                self.say({"error": str(error)})
        self._leave()

    def say(self, message: Message) -> None:
        """Never blocks: where the network stands still, only a thread that does nothing else waits for it."""
        self._answers.put(message)

    # ---- requests

    def _do(self, request: Message) -> None:
        what = request.pop("do")
        if what == "facts":
            self._lost_after = request["lost_after"]
            self.say({"facts": facts(request["directory"], request["code"], request["files"])})
        elif what == "listen":
            self._listen(request["port"], request["token"])
        elif what == "reach":
            self.say({"reached": reach(**request)})
        elif what == "start":
            self._start(**request)
        elif what == "signal":
            self._signalled[request["number"]] = set()
        elif what == "kill":
            self._end_all()

    def _listen(self, port: int, token: str) -> None:
        self._close_listener()
        self._listener = listener(port)
        threading.Thread(target=_greet, args=(self._listener, token), daemon=True).start()
        self.say({"listening": self._listener.getsockname()[1]})

    def _close_listener(self) -> None:
        """The port is free then: without the shutdown the thread that accepts would keep it."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def _start(self, argv: list[str], env: dict[str, str], directory: str, grace: float) -> None:
        self._close_listener()
        self._grace, self._signalled, self._had_ranks = grace, {}, False
        self._sent_to_torchrun, self._ends_at = 0, float("inf")
        process = subprocess.Popen(
            argv,
            env={**os.environ, **env},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._torchrun = process
        self.say({"started": process.pid})
        streams = {"out": process.stdout, "err": process.stderr}
        self._readers = [threading.Thread(target=self._pass_on, args=item, daemon=True) for item in streams.items()]
        for reader in self._readers:
            reader.start()

    # ---- processes

    def _next_request(self) -> Message | None:
        """The next one, None where the launcher is gone. Meanwhile it looks after the processes."""
        while True:
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=TICK)
                if request is None or request["do"] != "alive":
                    return request
            self._look_after()
            if time.monotonic() - self._heard > self._lost_after:
                return None

    def _look_after(self) -> None:
        if self._torchrun is None:
            return
        if self._signalled or not self._had_ranks:
            self._tell_ranks([pid for pid, parent in parents().items() if parent == self._torchrun.pid])
        if self._torchrun.poll() is not None or (time.monotonic() > self._ends_at and not self._had_ranks):
            self._end_all()

    def _tell_ranks(self, ranks: list[int]) -> None:
        """Signals go to the ranks and not to torchrun, which would not tell then with what status they ended.

        To torchrun only where it has not started them yet: not when they have just ended, and it has yet to notice.
        """
        assert self._torchrun is not None, "there are no ranks without it"
        self._had_ranks = self._had_ranks or bool(ranks)
        for number, reached in self._signalled.items():
            if not self._had_ranks and not self._sent_to_torchrun:
                self._sent_to_torchrun, self._ends_at = number, time.monotonic() + END_SECONDS
            for pid in ranks if self._had_ranks else [self._torchrun.pid]:
                if pid not in reached:
                    reached.add(pid)
                    _send(pid, number)

    def _end_all(self) -> None:
        """Kill what is left of torchrun and of all that torchrun started, and report torchrun's status."""
        if self._torchrun is None:
            return
        until = time.monotonic() + KILL_SECONDS
        while (left := descendants(os.getpid())) and time.monotonic() < until:
            for pid in left:
                _send(pid, signal.SIGKILL)
            self._torchrun.poll()
            time.sleep(0.02)
        status = self._torchrun.poll()
        if self._sent_to_torchrun and status:  # torchrun's handler makes 1 of every signal
            status = -self._sent_to_torchrun
        _reap_orphans()
        for reader in self._readers:
            reader.join(5)
        self._torchrun = None
        self.say({"ended": status, "left": left})

    def _leave(self) -> None:
        """The launcher is gone: the ranks may save, then nothing is left."""
        until = time.monotonic() + self._grace
        self._signalled = {signal.SIGTERM: set()}
        while self._torchrun is not None and time.monotonic() < until:
            time.sleep(TICK)
            self._look_after()
        self._end_all()
        os._exit(0)

    # ---- threads

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._heard = time.monotonic()
            self._requests.put(json.loads(line))
        self._requests.put(None)

    def _write(self) -> None:
        while True:
            text = json.dumps(self._answers.get())
            with contextlib.suppress(OSError):  # nobody is there to read it
                sys.stdout.buffer.write(text.encode() + b"\n")
                sys.stdout.buffer.flush()

    def _tell_alive(self) -> None:
        while True:
            self.say({"alive": True})
            time.sleep(ALIVE_EVERY)

    def _pass_on(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            self.say({name: line.decode(errors="replace").rstrip("\r\n")})


# ------------------------------------------------------------------------------------------------ processes


def _end_with_parent() -> None:
    """In the child: SIGTERM where this program is killed, so that torchrun ends the ranks."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def parents() -> dict[int, int]:
    """The parent of every process of this machine that still runs, by pid."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                state, parent = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state not in b"ZX":
                    found[int(directory.name)] = int(parent)
    return found


def descendants(of: int) -> list[int]:
    """Orphans count: they became children of this program, which is a subreaper."""
    parent = parents()

    def descends(pid: int) -> bool:
        while pid in parent:
            pid = parent[pid]
            if pid == of:
                return True
        return False

    return [pid for pid in parent if descends(pid)]


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap_orphans() -> None:
    with contextlib.suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# ------------------------------------------------------------------------------------------------ network


def listener(port: int) -> socket.socket:
    """On every address of the host. Errors: OSError where the port is taken."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def _greet(server: socket.socket, token: str) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            client, _ = server.accept()
            with client, contextlib.suppress(OSError):
                client.sendall(token.encode() + b"\n")
                client.settimeout(5)
                client.recv(1)  # the client closes first: the port must not stay behind in TIME_WAIT


def reach(address: str, port: int, token: str, seconds: float) -> str | None:
    """The network interface by which this host reaches the master. Errors: OSError, with what went wrong.

    A port on which something else listens does not give the token. With an empty one torchrun may listen there already,
    which gives none.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            left = max(1.0, until - time.monotonic())
            with socket.create_connection((address, port), timeout=left) as connection:
                said = connection.makefile("rb").readline().decode(errors="replace").strip() if token else ""
                if said != token:
                    raise ConnectionError(f"something else answers there: {said[:40]!r}")
                return interface_of(connection.getsockname()[0])
        except OSError:
            if time.monotonic() + 1 > until:
                raise
            time.sleep(1)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address."""
    if ":" in address and not address.startswith("::ffff:"):
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines())
        return next((fields[-1] for fields in lines if fields[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address.removeprefix("::ffff:"):
                    return name
    return None


# ------------------------------------------------------------------------------------------------ facts


def facts(directory: str, code: str, files: list[str]) -> dict[str, Any]:
    """What has to be alike on all hosts, and what people want to know of one. Paths as on the launcher's machine.

    Errors: ValueError where the directory is not there.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        raise ValueError(f"--directory {directory}: {error.strerror}") from error
    return {
        "alike": {
            "Python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "the code of hybridflow": _digest_of_code(Path(code)),
            **{f"the file {file}": _digest([Path(file)]) for file in files},
        },
        "revision": output_of(("git", "-C", code, "describe", "--always", "--dirty")),
        "gpus": output_of(GPUS).splitlines(),
        "hostname": socket.gethostname(),
        # client and server of the ssh connection; nothing on the launcher's own machine
        "addresses": os.environ.get("SSH_CONNECTION", "").split()[::2],
    }


def _version(package: str) -> str:
    names = (package, f"{package}-cpu")
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def _digest_of_code(root: Path) -> str:
    files = [file for package in ("hybridflow", "tools") for file in sorted((root / package).rglob("*.py"))]
    return _digest(files) if files else f"none in {root}"


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        try:
            total.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            return f"{file}: {error.strerror}"
    return total.hexdigest()[:12]


def output_of(command: tuple[str, ...]) -> str:
    """What a command says; nothing where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, errors="replace", timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main() -> None:
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher tells what a Ctrl-C means
    # Slurm may send SIGTERM to all processes of a job: the ranks save, and this program sees to it until the launcher
    # ends. A handler, since torchrun would inherit that it is ignored.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    Node().serve()


if __name__ == "__main__":
    main()
