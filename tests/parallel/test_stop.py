"""Which signals a rank takes for the wish that the run end. How they end it: tests/parallel/test_faults.py."""

import signal
import subprocess
import sys

import pytest

from hybridflow.parallel.stop import StopRequest

pytestmark = pytest.mark.slow  # waits for processes


def test_a_signal_that_the_rank_was_started_to_ignore_stays_ignored() -> None:
    """As launch/slurm.sbatch starts it: Slurm may send the signal to all processes, and SIGTERM comes for it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        StopRequest(1.0, signals=(signal.SIGUSR1,)).listen()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


LISTENS = """
import signal
import time
from hybridflow.parallel.stop import StopRequest
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, whose processes ignore it
stop = StopRequest(60.0)
stop.listen()
print("listens", flush=True)
while stop.requested is None:
    time.sleep(0.01)
print(stop.requested)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_scheduler_and_a_terminal_that_closes_are_heard(name: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "listens\n"
    process.send_signal(getattr(signal, name))
    assert process.communicate()[0] == f"{name}\n"
    assert process.returncode == 0
