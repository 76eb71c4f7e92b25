"""A real Slurm on the hosts of tests/launcher/network.py: slurmctld where no rank runs, and a slurmd on each host.

    with cluster(tmp_path) as slurm:
        job = slurm.submit(directory, "--nodes=2", "launch/slurm.sbatch", "config.yaml")
        assert job.wait() == ("COMPLETED", "0:0", "0"), job.said

Its programs are Debian's or Ubuntu's slurm-wlm and munge, run by root without systemd. All their files are in tmp_path,
but for the cgroups of `proctrack="cgroup"`. They end with the hosts, whatever becomes of the test.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launcher.jobs import rank_of, words
from tests.launcher.namespaces import PATIENCE, search_path
from tests.launcher.network import Host, Network, network

MUST_RUN = "HYBRIDFLOW_MUST_RUN_SLURM"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged")
SECONDS = 600.0  # for a job to come to something, on a slow machine that others use
OF_SLURM = {"slurmd", "slurmstepd", "munged"}
CPUS, GPUS = 4, 2  # of a node, as Slurm sees it
# cred_expire: a job waits so long when it is requeued. bf_interval: of the scheduler that Slurm 23.11 leaves jobs to
# which have no account. FirstJobId: cgroups are called by it, and other tests may have a Slurm at the same time.
FILES = {
    "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupMountpoint={directory}/cgroup\n",
    "gres.conf": "Name=gpu File={directory}/gpu[0-{last_gpu}]\n",
    "slurm.conf": """
ClusterName=hybridflow
SlurmctldHost=launcher
SlurmUser=root
FirstJobId={first_job}
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
{more}
NodeName={nodes} CPUs={cpus} Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES
""",
}


@dataclasses.dataclass(frozen=True)
class Slurm:
    net: Network
    directory: Path
    proctrack: str

    def call(self, *argv: str | Path, **variables: str) -> str:
        """What one of Slurm's commands prints. Errors: AssertionError with what it says where it fails."""
        environment = {"PATH": search_path(), "HOME": os.environ["HOME"], **self.environment, **variables}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.net.run(None, argv, env=environment, **streams)
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, f"{argv}: {process.returncode}: {error}{self.logs()}"
        return out.strip()

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def submit(self, directory: Path, *words: str, **variables: str) -> "Job":
        """In a directory that looks like the repository's root, with these variables in its environment."""
        enter = ("env", f"--chdir={directory}")  # nsenter has left the directory that we are in
        number = self.call(*enter, "sbatch", "--parsable", f"--output={directory}/%j.out", *words, **variables)
        return Job(self, int(number), directory)

    def cancel_all(self) -> None:
        """Waits until the nodes are free."""
        self.call("scancel", "--user=root")
        self.wait_for(lambda: not self.call("squeue", "--noheader"))

    def left(self, seconds: float = 0.0) -> dict[str, list[str]]:
        """What runs on the hosts beside Slurm, after so many seconds at most, by host."""
        until = time.monotonic() + seconds
        while (found := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _left(self) -> dict[str, list[str]]:
        found = {host.name: [" ".join(words(pid))[:200] for pid in self.processes(host)] for host in self.net.hosts}
        return {name: processes for name, processes in found.items() if processes}

    def processes(self, host: Host) -> list[int]:
        return [pid for pid in self.net.processes(host) if _name(pid) not in OF_SLURM]

    def logs(self) -> str:
        return "".join(
            f"\n{file.name}:\n{file.read_text(errors='replace')[-2000:]}"
            for file in sorted(self.directory.glob("*.log"))
        )

    # ---- daemons

    def start(self) -> None:
        self._start(None, "munged", "--foreground", *self._munge())
        self.wait_for((self.directory / "munge.socket").exists)
        self._start(None, "slurmctld", "-D", "-c")
        for host in self.net.hosts:
            self.start_slurmd(host)
        self.wait_for(lambda: self.call("sinfo", "--noheader", "--format=%T %D") == f"idle {len(self.net.hosts)}")

    def _mount_freezer(self, host: Host | None) -> None:
        """`ip netns exec` has hidden /sys/fs/cgroup. The mount is the host's own, the cgroups are the machine's."""
        place = self.directory / "cgroup" / "freezer"
        place.mkdir(parents=True, exist_ok=True)
        status = self.net.run(host, ["mount", "-t", "cgroup", "-o", "freezer", "freezer", place]).wait(PATIENCE)
        if status:
            pytest.skip(
                f"mount -t cgroup -o freezer: {status}: this kernel has no freezer for Slurm's proctrack/cgroup"
            )

    def close(self) -> None:
        """End the nodes, and remove their cgroups: those of the machine stay when the mounts go."""
        for host in self.net.hosts:
            self.net.kill_host(host)
        if self.proctrack == "cgroup":
            self._mount_freezer(None)
            for host in self.net.hosts:
                top = self.directory / "cgroup" / "freezer" / f"slurm_{host.name}"
                remove = ["find", top, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]
                self.net.run(None, remove, stderr=subprocess.DEVNULL).wait(PATIENCE)

    def start_slurmd(self, host: Host) -> None:
        if self.proctrack == "cgroup":
            self._mount_freezer(host)
        self._start(host, "slurmd", "-D")

    def wait_for(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"not within {seconds} s{self.logs()}"
            time.sleep(0.1)

    def _munge(self) -> list[str]:
        (self.directory / "munge.key").write_bytes(os.urandom(1024))
        (self.directory / "munge.key").chmod(0o600)
        kinds = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "messages"}
        # --force: pytest's directories may be other users' to write
        return ["--force", *(f"--{option}={self.directory}/munge.{ending}" for option, ending in kinds.items())]

    def _start(self, host: Host | None, *argv: str) -> None:
        environment = {**os.environ, "PATH": search_path(), **self.environment}
        with (self.directory / f"{argv[0]}.{host.name if host else 'launcher'}.log").open("ab") as log:
            self.net.run(host, argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


@dataclasses.dataclass(frozen=True)
class Job:
    slurm: Slurm
    number: int
    directory: Path

    @property
    def facts(self) -> dict[str, str]:
        """As Slurm's controller has them: JobState, ExitCode, Restarts, ..."""
        told = self.slurm.call("scontrol", "show", "job", str(self.number), "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", told))

    @property
    def end(self) -> tuple[str, str, str]:
        """State, exit status and number of restarts."""
        facts = self.facts
        return facts["JobState"], facts["ExitCode"], facts["Restarts"]

    @property
    def said(self) -> str:
        file = self.directory / f"{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Errors: AssertionError with what the job has said, where it ends before."""
        until = time.monotonic() + seconds
        while not condition():
            facts = self.facts
            over = facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING") and not condition()
            assert not over and time.monotonic() < until, f"{facts}\n{self.said[-6000:]}{self.slurm.logs()}"
            time.sleep(0.1)

    def wait(self, seconds: float = SECONDS) -> tuple[str, str, str]:
        """Its end."""
        until = time.monotonic() + seconds
        while self.facts["JobState"] in ("PENDING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < until, f"{self.facts}\n{self.said[-6000:]}{self.slurm.logs()}"
            time.sleep(0.1)
        return self.end

    def tell(self, signal: str) -> None:
        self.slurm.call("scancel", "--batch", f"--signal={signal}", str(self.number))

    def cancel(self) -> None:
        self.slurm.call("scancel", str(self.number))

    def ranks(self) -> dict[int, int]:
        """pids by rank, of all hosts."""
        found = {rank_of(pid): pid for pid in self.processes() if "hybridflow.train" in words(pid)}
        return {int(rank): pid for rank, pid in found.items() if rank}

    def torchruns(self) -> list[int]:
        return [pid for pid in self.processes() if "torch.distributed.run" in words(pid)]

    def processes(self) -> list[int]:
        mine = f"SLURM_JOB_ID={self.number}".encode()
        return [pid for host in self.slurm.net.hosts for pid in self.slurm.processes(host) if mine in _environ(pid)]

    def rows(self, name: str) -> int:
        """Of metrics.csv, beside its header."""
        file = self.directory / name / "metrics.csv"
        return max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0


@contextlib.contextmanager
def cluster(tmp_path: Path, proctrack: str = "linuxproc", more: str = "") -> Iterator[Slurm]:
    """Two nodes, n1 and n2. more: lines of slurm.conf.

    Where there can be none the test is skipped and says why; where HYBRIDFLOW_MUST_RUN_SLURM is 1 it fails.
    """
    if reason := why_not():
        assert os.environ.get(MUST_RUN) != "1", f"{MUST_RUN}=1, and {reason}"
        pytest.skip(reason)
    with network(tmp_path, names=("n1", "n2")) as net:
        directory = tmp_path / "slurm"
        (directory / "state").mkdir(parents=True)
        values = {"directory": directory, "proctrack": proctrack, "more": more, "nodes": "n[1-2]"}
        values["first_job"] = os.getpid()
        for name, text in FILES.items():
            (directory / name).write_text(text.format(cpus=CPUS, gpus=GPUS, last_gpu=GPUS - 1, **values))
        for number in range(GPUS):  # device nodes stand in for GPUs: those of /dev/null
            os.mknod(directory / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        slurm = Slurm(net, directory, proctrack)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.close()


def why_not() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    if missing := [program for program in PROGRAMS if shutil.which(program, path=search_path()) is None]:
        return f"not installed: {', '.join(missing)} (Debian, Ubuntu: slurm-wlm, munge)"
    return None


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "slurmd"  # it has ended


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
