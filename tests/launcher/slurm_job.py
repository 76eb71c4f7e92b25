"""launch/slurm.sbatch as Slurm runs it, with stand-ins for Slurm's commands and for launch/run.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SBATCH = Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch"

# Starts the command once a node, passes USR1 on, and ends with the highest status, as srun does. Where ALL is set a
# signal goes to all processes of a task, as some clusters have it.
SRUN = """
import os, signal, subprocess, sys, json, pathlib
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1:]
while command[0].startswith("--"):
    del command[0]
pathlib.Path("srun.json").write_text(json.dumps(sys.argv[1 : len(sys.argv) - len(command)]))
nodes = []
def forward(number, frame):
    for node in nodes:
        (os.killpg if os.environ.get("ALL") else os.kill)(node.pid, number)
signal.signal(signal.SIGUSR1, forward)
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    environment = {**os.environ, "SLURM_NODEID": str(node)}
    nodes.append(subprocess.Popen(command, env=environment, start_new_session=True))
statuses = [node.wait() for node in nodes]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
SCONTROL = """
import os, sys, pathlib
if sys.argv[1:] == ["show", "hostnames", "gpu-[07-08]"]:
    print("gpu-07\\ngpu-08")
elif sys.argv[1:] == ["show", "job", "1234567", "--oneliner"]:
    print("JobId=1234567 RunTime=00:00:09 TimeLimit=" + os.environ["LIMIT"] + " TimeMin=N/A")
else:
    pathlib.Path("scontrol.txt").write_text(" ".join(sys.argv[1:]))
"""
# Says what it was called with; ends with the status of its node in STATUSES, or when it is told to. Where LOADS is set
# it has no handler yet.
RUN = """
import json, os, pathlib, signal, sys, time
node = os.environ["SLURM_NODEID"]
told = []
if not os.environ.get("LOADS"):
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
ignored = signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
called = {"argv": sys.argv[1:], "ignores_usr1": ignored, "ROOM": os.environ.get("ROOM")}
pathlib.Path(f"called_{node}.new").write_text(json.dumps(called))
os.rename(f"called_{node}.new", f"called_{node}")
statuses = os.environ["STATUSES"].split()
if statuses:
    sys.exit(int(statuses[int(node)]))
end = time.monotonic() + 30
while not told:
    if time.monotonic() > end:
        sys.exit("nobody has told it to end")
    time.sleep(0.02)
time.sleep(0.2)  # it saves
sys.exit(75 if len(told) == 1 else 76)
"""


class Job:
    """A job of two nodes."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self.directory = directory
        lay_out(directory)
        self._environment = {
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(directory),
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "gpu-[07-08]",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_ON_NODE": "192",
            "STATUSES": "",
            **environment,
        }
        self.process = subprocess.Popen(
            ["bash", SBATCH, *arguments],
            env=self._environment,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Its status and what it has printed."""
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out

    def tell(self, number: signal.Signals) -> None:
        """Once every node's launcher runs."""
        deadline = time.monotonic() + 60
        while not all((self.directory / f"called_{node}").exists() for node in (0, 1)):
            assert time.monotonic() < deadline and self.process.poll() is None, os.listdir(self.directory)
            time.sleep(0.02)
        self.process.send_signal(number)

    def called(self, node: int) -> dict[str, Any]:
        return json.loads((self.directory / f"called_{node}").read_text())

    @property
    def requeued(self) -> str | None:
        told = self.directory / "scontrol.txt"
        return told.read_text() if told.exists() else None


def lay_out(directory: Path) -> None:
    """A repository's root as the script sees it, and Slurm's commands in bin/."""
    for name, source in (("bin/srun", SRUN), ("bin/scontrol", SCONTROL), ("launch/run.py", RUN)):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable} -S\n{source}")
        path.chmod(0o755)
    (directory / ".venv" / "bin").mkdir(parents=True)
    (directory / ".venv" / "bin" / "python").symlink_to(sys.executable)
