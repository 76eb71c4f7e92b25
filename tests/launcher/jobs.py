"""launch/run.py on the hosts of `tests.launcher.network`: started, waited for, and its processes found."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.forks import ROOT
from tests.launcher.network import Host, Network

SECONDS = 400.0  # of a run on a slow machine


class Job:
    """The launcher, in a namespace where no rank runs. Its output goes to files, which can be read meanwhile."""

    def __init__(self, net: Network, directory: Path, *arguments: object, slots: int = 1, hostfile: str = "") -> None:
        self.net, self.directory = net, directory
        directory.mkdir(exist_ok=True)
        (directory / "hosts").write_text(hostfile or "".join(f"{host.name} slots={slots}\n" for host in net.hosts))
        self.output = directory / "output"
        command = [sys.executable, ROOT / "launch" / "run.py", "--hostfile", directory / "hosts"]
        command += ["--ssh-config", net.ssh_config, "--python", sys.executable, "--directory", directory]
        command += ["--env", f"PYTHONPATH={ROOT}", "--env", "OMP_NUM_THREADS=1", *arguments]
        self.began = time.monotonic()
        with self.output.open("wb") as output:
            self.process = net.run(
                None, [str(word) for word in command], stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit status. A job that does not end fails the test, with what it said."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"no end after {seconds} s\n{self.said[-6000:]}") from None

    def wait_for(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        until = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"it did not come to that ({self.process.returncode})\n{self.said[-6000:]}")
            time.sleep(0.05)

    def rows(self, name: str = "run") -> int:
        """Of metrics.csv, beside its header."""
        file = self.directory / name / "metrics.csv"
        return max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0

    def torchrun(self, host: Host) -> int:
        [pid] = [pid for pid in self.net.processes(host) if "torch.distributed.run" in words(pid) and not rank_of(pid)]
        return pid

    def ranks(self, host: Host) -> dict[int, int]:
        """pids by rank."""
        found = {rank_of(pid): pid for pid in self.net.processes(host) if "hybridflow.train" in words(pid)}
        return {int(rank): pid for rank, pid in found.items() if rank}

    def left(self) -> dict[str, list[str]]:
        """What still runs on the hosts half a minute after the launcher's end, by host."""
        until = time.monotonic() + 30
        while any(self.net.processes(host) for host in self.net.hosts) and time.monotonic() < until:
            time.sleep(0.1)
        found = {host.name: [" ".join(words(pid))[:200] for pid in self.net.processes(host)] for host in self.net.hosts}
        return {name: processes for name, processes in found.items() if processes}


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)


def words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def rank_of(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((word[5:].decode() for word in variables if word.startswith(b"RANK=")), "")


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, number)
