"""Start one torchrun with many cases in it: starting ranks costs more than most cases."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def torchrun(
    num_ranks: int, *arguments: object, timeout: int, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run `torchrun -m ARGUMENTS` or a script on `num_ranks` ranks of this machine; output as text.

    A hang ends after `timeout` seconds, with the stacks of every rank in the error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "1",  # SIGABRT prints the stacks of all threads
        **(environment or {}),
    }
    agent = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, error = agent.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        abort_ranks(agent.pid)
        out, error = agent.communicate(timeout=60)  # torchrun ends by itself when its ranks have
        raise AssertionError(
            f"{' '.join(command)}\nno end after {timeout} s\n{out[-4000:]}\n{error[-30000:]}"
        ) from None
    done = subprocess.CompletedProcess(command, agent.returncode, out, error)
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{out[-4000:]}\n{error[-8000:]}"
    return done


def abort_ranks(agent: int) -> None:
    """Have every rank of a torchrun print its stacks and end; the agent, held meanwhile, would end the others first."""
    os.kill(agent, signal.SIGSTOP)
    for rank in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        os.kill(int(rank), signal.SIGABRT)
        time.sleep(0.5)  # one after the other: they write to one pipe, a few letters at a time
    time.sleep(1)
    os.kill(agent, signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
