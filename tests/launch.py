"""Start the ranks of a test: as forks of a process that has everything imported, or truly by torchrun.

Importing torch, megatron and vLLM takes a rank longer than most tests do; a fork has it behind it. torchrun starts the
ranks where the start and the end of processes are what is tested, and where there is CUDA, which no fork can use.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextvars import ContextVar
from pathlib import Path

from hybridflow.parallel.device import uses_cuda
from tests.forks import ROOT, run_forks

# of one launch: the longest takes 100 on two cores; another machine may be slower, and shared
SECONDS = float(os.environ.get("HYBRIDFLOW_RANKS_SECONDS", "900"))
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARKED: ContextVar[bool] = ContextVar("MARKED", default=True)  # conftest: whether this test is marked as distributed


def of_no_rank(**more: str) -> dict[str, str]:
    """This process's environment for a command that starts ranks: tests that join a group of one leave a rank's."""
    return {name: value for name, value in os.environ.items() if name not in OF_A_RANK} | more


def run_ranks(
    num_ranks: int,
    module: str,
    *arguments: object,
    check: bool = True,
    restarts: int = 0,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` on `num_ranks` ranks of this machine; output as text.

    restarts: the ranks find that torchrun has restarted them so often; not where there is CUDA.

    A hang ends after `SECONDS`, with the stacks of every rank in the error.
    """
    if uses_cuda():
        assert not restarts, "torchrun counts its restarts itself"
        return torchrun(num_ranks, "-m", module, *arguments, check=check, environment=environment)
    assert_marked()
    command = [f"{num_ranks} x {module}", *map(str, arguments)]
    more = {"restarts": restarts, "environment": environment}
    status, out, error = run_forks(num_ranks, module, command[1:], seconds=SECONDS, **more)
    if status is None:
        raise hang(command, SECONDS, out, error)
    return checked(subprocess.CompletedProcess(command, status, out, error), check)


def torchrun(
    num_ranks: int, *arguments: object, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The same by `torchrun ARGUMENTS`, `-m MODULE ...` or a script."""
    assert_marked()
    agent = start_torchrun(num_ranks, *arguments, environment=environment)
    return checked(finish(agent, SECONDS), check)


def start_torchrun(
    num_ranks: int, *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        ),  # packages may lie there
        "PYTHONFAULTHANDLER": "1",  # SIGABRT prints the stacks of all threads
        **(environment or {}),
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(agent: subprocess.Popen[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        out, error = agent.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        abort_ranks(agent.pid)
        out, error = agent.communicate(timeout=60)  # torchrun ends by itself when its ranks have
        raise hang(agent.args, seconds, out, error) from None
    return subprocess.CompletedProcess(agent.args, agent.returncode, out, error)


def abort_ranks(agent: int) -> None:
    """Have every rank of a torchrun print its stacks and end; the agent, held meanwhile, would end the others first."""
    os.kill(agent, signal.SIGSTOP)
    for rank in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        os.kill(int(rank), signal.SIGABRT)
        time.sleep(0.5)  # one after the other: they write to one pipe, a few letters at a time
    time.sleep(1)
    os.kill(agent, signal.SIGCONT)


def assert_marked() -> None:
    assert MARKED.get(), "a test that starts several processes needs @pytest.mark.distributed"


def hang(command: list[str], seconds: float, out: str, error: str) -> AssertionError:
    return AssertionError(f"{' '.join(command)}\nno end after {seconds} s\n{out[-4000:]}\n{error[-30000:]}")


def checked(done: subprocess.CompletedProcess[str], check: bool) -> subprocess.CompletedProcess[str]:
    assert not check or done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
