"""Network namespaces by `ip netns`, their processes, and the commands that make them: for tests/launcher/network.py."""

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # sshd, ip and tc are not in every PATH
NETNS_FILES = Path("/etc/netns")
PATIENCE = 20.0  # seconds for a daemon to start or a process to end
CLONE_NEWPID = 0x20000000  # sched.h
LIBC = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12


class CommandError(Exception):
    """A command of the system's has failed; the text is the command and what it said."""


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


@contextlib.contextmanager
def children_in(init: int) -> Iterator[None]:
    """What this thread starts meanwhile is of the process ids of `init`."""
    with open("/proc/self/ns/pid") as ours, open(f"/proc/{init}/ns/pid") as theirs:
        set_children_namespace(theirs.fileno())
        try:
            yield
        finally:
            set_children_namespace(ours.fileno())


def set_children_namespace(descriptor: int) -> None:
    if LIBC.setns(descriptor, CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns of process ids")


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


def wait_for_end(pid: int) -> None:
    """A host's first process ends when its parents have asked for the status of each of the others."""
    deadline = time.monotonic() + PATIENCE
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Not so what has ended, though nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
