"""Which signals a rank takes for the wish that the run end. How they end it: tests/parallel/test_faults.py."""

import signal

from hybridflow.parallel.stop import StopRequest


def test_a_signal_that_the_rank_was_started_to_ignore_stays_ignored() -> None:
    """As launch/slurm.sbatch starts it: Slurm may send the signal to all processes, and SIGTERM comes for it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        StopRequest(1.0, signals=(signal.SIGUSR1,)).listen()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
