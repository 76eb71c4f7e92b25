"""Start one torchrun with many cases in it: starting ranks costs more than most cases."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def torchrun(
    num_ranks: int, *arguments: object, timeout: int, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run `torchrun -m ARGUMENTS` or a script on `num_ranks` ranks of this machine; output as text.

    A hang ends after `timeout` seconds; workers print every rank's stack shortly before (tests.launch.watchdog).
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), *map(str, arguments)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HYBRIDFLOW_TEST_LIMIT": str(timeout - 10),
        **(environment or {}),
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def watchdog() -> None:
    """In a worker: print this rank's stacks and exit when the launcher's time is nearly over."""
    import faulthandler

    faulthandler.dump_traceback_later(float(os.environ["HYBRIDFLOW_TEST_LIMIT"]), exit=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
