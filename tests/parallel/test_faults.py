"""What befalls a rank ends all, soon, and one report says what it was; a stop is agreed. Truly done, on three ranks."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from hybridflow.errors import ExitStatus
from tests.forks import environment_of
from tests.launch import assert_marked, finish, start_torchrun
from tests.parallel import faults_worker
from tests.parallel.faults_worker import DEADLINE, VICTIM

pytestmark = pytest.mark.distributed

NUM_RANKS = 3
WITHIN = DEADLINE + 25.0  # of a machine that others use too; 8 on one that is free
SIGTERM_OF_TORCHRUN = signal.SIGTERM


class Ranks:
    """Forks of a process that has torch loaded."""

    def __init__(self, case: str, directory: Path) -> None:
        assert_marked()
        self.directory = directory
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.parallel.faults_worker"])
        port, sent = context.Pipe(duplex=False)
        self.store = context.Process(target=faults_worker.serve_store, args=(sent,))
        self.store.start()
        number = port.recv()
        environments = [environment_of(rank, NUM_RANKS, number) for rank in range(NUM_RANKS)]
        self.processes: list[BaseProcess] = [
            context.Process(target=faults_worker.fork, args=(environment, case, directory))
            for environment in environments
        ]
        for process in self.processes:
            process.start()

    def wait_until_ready(self, num_ranks: int = NUM_RANKS) -> None:
        wait_until_ready(self.directory, num_ranks)

    def signal(self, sign: signal.Signals, *ranks: int) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, sign)

    def statuses(self, seconds: float = WITHIN) -> list[int | None]:
        """How each ended; None: it has not."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in self.processes]

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def close(self) -> None:
        for process in [*self.processes, self.store]:
            process.kill()
            process.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Ranks] = []

    def start_ranks(case: str) -> Ranks:
        started.append(Ranks(case, tmp_path))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.close()


def wait_until_ready(directory: Path, num_ranks: int) -> None:
    until = time.monotonic() + 60
    while len([rank for rank in range(NUM_RANKS) if (directory / str(rank)).exists()]) < num_ranks:
        assert time.monotonic() < until, "the ranks do not begin"
        time.sleep(0.02)


def last_calls(report: str, rank: int) -> list[str]:
    """The lines under the rank's name in "What each rank did last"."""
    told = report.partition("What each rank did last:\n")[2].partition("\nPython stacks")[0]
    [found] = re.findall(rf"^  rank {rank} [^\n]*\n((?:    [^\n]*\n)*)", told + "\n", flags=re.MULTILINE)
    return [line.strip() for line in found.splitlines()]


# ------------------------------------------------------------------------------------------------ stuck


@pytest.mark.thorough
def test_a_stopped_rank_is_named_and_all_end(start) -> None:
    ranks = start("exchange")
    ranks.wait_until_ready()
    ranks.signal(signal.SIGSTOP, VICTIM)
    assert ranks.statuses() == [ExitStatus.HANG, -signal.SIGKILL, ExitStatus.HANG]
    report = (ranks.directory / "logs" / "hang_report.txt").read_text()
    pid = ranks.processes[VICTIM].pid
    first = report.splitlines()[0]
    assert re.fullmatch(
        rf"hybridflow: hang: rank 1 \(pid {pid} on \S+\) says nothing: it is stopped \(state T\)", first
    )
    assert f"(watchdog.update_seconds = {DEADLINE:g})" in report.splitlines()[1]
    assert ranks.output.count("hybridflow: hang:") == 1 and report in ranks.output
    for rank in (0, 2):
        calls = last_calls(report, rank)
        inside = [call for call in calls if call.endswith("inside it")]
        assert len(inside) == 1 and inside[0].startswith(("allreduce [4] of torch.float32 (16 bytes)", "broadcast"))
    assert "Python stacks of rank" in report and "in work" in report and "dist." in report
    assert "rank 1 " in report and last_calls(report, 1) == []


@pytest.mark.thorough
def test_a_rank_in_native_code_that_keeps_pythons_lock_is_named(start) -> None:
    ranks = start("native")
    assert ranks.statuses() == [ExitStatus.HANG, -signal.SIGKILL, ExitStatus.HANG]
    [line] = [line for line in ranks.output.splitlines() if line.startswith("hybridflow: hang:")]
    assert re.search(
        r"hang: rank 1 \(.*\) says nothing: it runs \(state S\), but its Python threads do not: native", line
    )


def test_a_rank_in_a_loop_is_named_by_what_it_has_not_entered(start) -> None:
    ranks = start("loop")
    assert ranks.statuses() == [ExitStatus.HANG] * NUM_RANKS
    report = (ranks.directory / "logs" / "hang_report.txt").read_text()
    lines = report.splitlines()
    assert re.fullmatch(
        r"hybridflow: hang: rank 1 \(pid \d+ on \S+\) has not entered allreduce, collective (\d+) of group "
        r"0 \(default_pg, ranks 0-2\), where ranks 0,2 wait: it is inside no collective, in phase update",
        lines[0],
    )
    assert lines[1].startswith("  phase update: rank ")
    [stacks_of_victim] = re.findall(r"Python stacks of rank 1:\n(.*?)(?:\n\n|\Z)", report, flags=re.DOTALL)
    assert "MainThread" in stacks_of_victim.splitlines()[0] and "in loops_here" in stacks_of_victim
    [stacks_of_others] = re.findall(r"Python stacks of ranks 0,2:\n(.*?)(?:\n\n|\Z)", report, flags=re.DOTALL)
    assert "in all_reduce" in stacks_of_others and "loops_here" not in stacks_of_others
    own = int(re.search(r", (\d+) collectives of group 0 ", "".join(last_calls(report, 1)))[1])
    other = int(re.search(r", (\d+) collectives of group 0 ", "".join(last_calls(report, 0)))[1])
    assert other == own + 1


@pytest.mark.thorough
def test_a_rank_that_never_comes_is_named_also_where_one_waits_for_a_message_of_its(start) -> None:
    ranks = start("recv")
    assert ranks.statuses() == [ExitStatus.HANG] * NUM_RANKS
    report = (ranks.directory / "logs" / "hang_report.txt").read_text()
    [line] = [line for line in report.splitlines() if line.startswith("hybridflow: hang:")]
    assert re.match(
        r"hybridflow: hang: rank 1 \(pid \d+ on \S+\) has not entered allreduce, .* where rank 0 waits: ", line
    )
    [inside] = [call for call in last_calls(report, 2) if call.endswith("inside it")]
    assert inside.startswith("recv with rank 1 [3] of torch.float32 (12 bytes), ")
    assert "in sleeps_here" in report


@pytest.mark.thorough
def test_no_deadline_passes_in_a_healthy_run(start) -> None:
    """It takes longer than one deadline, no phase does."""
    began = time.monotonic()
    ranks = start("healthy")
    assert ranks.statuses(60) == [0] * NUM_RANKS
    assert time.monotonic() - began > DEADLINE
    assert ranks.output == "" and not (ranks.directory / "logs").exists()


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.thorough
def test_without_a_store_every_rank_speaks_for_itself(sign: signal.Signals, start) -> None:
    """Its host is stopped, as one is that the network has lost, and a question waits for ever; or it is gone."""
    ranks = start("exchange")
    ranks.wait_until_ready()
    ranks.signal(signal.SIGSTOP, VICTIM)
    os.kill(ranks.store.pid, sign)
    assert ranks.statuses() == [ExitStatus.HANG, -signal.SIGKILL, ExitStatus.HANG]
    assert ranks.output.count("says nothing: it is stopped (state T)\nhybridflow: hang: rank ") == 2
    for rank in (0, 2):
        assert f"\nPython stacks of rank {rank}:\n  MainThread:\n" in ranks.output
    assert ranks.output.count("TCPStore.cpp") <= NUM_RANKS  # torch's own warning of a broken connection, once a rank


# ------------------------------------------------------------------------------------------------ gone


def end_of_torchrun(case: str, directory: Path, sign: signal.Signals | None, *options: str) -> tuple[int, float, str]:
    """(pid of the victim, seconds that the end took, what was printed) under a real torchrun."""
    agent = start_torchrun(NUM_RANKS, *options, "-m", "tests.parallel.faults_worker", directory, case)
    wait_until_ready(directory, NUM_RANKS if sign else NUM_RANKS - 1)
    began = time.monotonic()
    pid = int((directory / str(VICTIM)).read_text()) if sign else 0
    if sign:
        os.kill(pid, sign)
    done = finish(agent, 60)
    assert done.returncode == 1
    for rank in range(NUM_RANKS):
        if (directory / str(rank)).exists():
            assert not Path("/proc", (directory / str(rank)).read_text()).exists()
    return pid, time.monotonic() - began, done.stderr


NOT_SEEN = "cause not seen from here"


def root_cause(error: str) -> str:
    return error[error.index("Root Cause") :]


@pytest.mark.parametrize("case", ["exchange", "computing"])
def test_a_killed_rank_is_named_by_us_and_by_torchrun(case: str, tmp_path: Path) -> None:
    """The others are inside a collective, or compute and need nobody. What torchrun has reaped shows no cause."""
    pid, seconds, error = end_of_torchrun(case, tmp_path, signal.SIGKILL)
    assert seconds < 25
    [told] = [line for line in error.splitlines() if line.startswith("hybridflow:")]
    assert re.match(
        rf"hybridflow: rank 1 \(pid {pid} on \S+\) ended without a word: (killed by SIGKILL|{NOT_SEEN})", told
    )
    assert "faults_worker.py" not in error  # no traceback of a victim's
    assert f"(pid: {pid})" in root_cause(error) and "Signal 9 (SIGKILL)" in root_cause(error)


@pytest.mark.thorough
def test_a_crash_shows_where_and_is_named_each_time(tmp_path: Path) -> None:
    """torchrun's store outlives a restart, with the notes of the start before."""
    _, seconds, error = end_of_torchrun("segfault", tmp_path, None, "--max-restarts", "1")
    assert seconds < 40
    assert error.count("Fatal Python error: Segmentation fault") == 2 and "in crashes_here" in error
    told = [line for line in error.splitlines() if line.startswith("hybridflow:")]
    assert len(told) == 2 and told[0] != told[1]
    for line in told:
        assert re.match(
            rf"hybridflow: rank 1 \(pid \d+ on \S+\) ended without a word: (killed by SIGSEGV|{NOT_SEEN})", line
        )
    assert "rank      : 1 " in root_cause(error) and "Signal 11 (SIGSEGV)" in root_cause(error)


def test_an_error_of_a_ranks_own_is_told_by_that_rank_alone(start) -> None:
    ranks = start("error")
    ranks.statuses(3)
    ranks.signal(SIGTERM_OF_TORCHRUN, 0, 2)  # as it does when one has failed
    assert ranks.statuses() == [ExitStatus.ERROR] * NUM_RANKS
    assert ranks.output.count("Traceback") == 1 and "ConfigError: a mistake of the user's" in ranks.output
    assert "hybridflow:" not in ranks.output


@pytest.mark.thorough
def test_a_silent_host_ends_the_others(start) -> None:
    """Each rank says that it is on a host of its own, so none looks at the other's pid."""
    ranks = start("hosts")
    ranks.wait_until_ready()
    ranks.signal(signal.SIGKILL, VICTIM)
    assert ranks.statuses(40) == [ExitStatus.ERROR, -signal.SIGKILL, ExitStatus.ERROR]
    [told] = [line for line in ranks.output.splitlines() if line.startswith("hybridflow:")]
    assert told.startswith("hybridflow: host host1, ranks 1, has been silent for 3 s")
    assert "Traceback" not in ranks.output


@pytest.mark.thorough
def test_an_error_on_one_host_ends_the_others_without_a_word_of_theirs(start) -> None:
    began = time.monotonic()
    ranks = start("hosts, error")
    assert ranks.statuses() == [ExitStatus.ERROR] * NUM_RANKS
    assert time.monotonic() - began < 15
    assert ranks.output.count("Traceback") == 1 and "ConfigError: a mistake of the user's" in ranks.output
    assert "hybridflow:" not in ranks.output


# ------------------------------------------------------------------------------------------------ told to stop


def test_all_agree_on_the_iteration_in_which_one_was_told(start) -> None:
    ranks = start("agreed")
    ranks.wait_until_ready()
    ranks.signal(signal.SIGUSR1, VICTIM)
    assert ranks.statuses() == [ExitStatus.STOPPED] * NUM_RANKS
    told = [(ranks.directory / f"agreed_{rank}").read_text().split() for rank in range(NUM_RANKS)]
    assert len({step for step, _ in told}) == 1
    assert [name for _, name in told] == ["None", "SIGUSR1", "None"]


def test_under_torchrun_all_end_as_told_when_one_is_told(tmp_path: Path) -> None:
    """The first to end has torchrun signal the others, more than a second after the first signal."""
    agent = start_torchrun(NUM_RANKS, "-m", "tests.parallel.faults_worker", tmp_path, "agreed")
    wait_until_ready(tmp_path, NUM_RANKS)
    os.kill(int((tmp_path / "2").read_text()), signal.SIGTERM)
    done = finish(agent, 60)
    assert done.returncode == 1  # torchrun's own, whatever its ranks end with
    assert "exitcode  : 75 " in root_cause(done.stderr)
    assert "hybridflow:" not in done.stderr and "exitcode  : 76" not in done.stderr


@pytest.mark.thorough
def test_a_signal_to_torchrun_reaches_all_ranks(tmp_path: Path) -> None:
    agent = start_torchrun(NUM_RANKS, "-m", "tests.parallel.faults_worker", tmp_path, "agreed")
    wait_until_ready(tmp_path, NUM_RANKS)
    agent.send_signal(signal.SIGTERM)
    finish(agent, 60)
    told = [(tmp_path / f"agreed_{rank}").read_text().split() for rank in range(NUM_RANKS)]
    assert len({step for step, _ in told}) == 1 and "SIGTERM" in {name for _, name in told}


@pytest.mark.thorough
def test_a_second_signal_to_torchrun_ends_all_at_once(tmp_path: Path) -> None:
    agent = start_torchrun(NUM_RANKS, "-m", "tests.parallel.faults_worker", tmp_path, "exchange")
    wait_until_ready(tmp_path, NUM_RANKS)
    agent.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert agent.poll() is None
    agent.send_signal(signal.SIGTERM)
    done = finish(agent, 20)
    # each says so, but for one that its collective tells first, on a busy machine, that another has gone
    assert 1 <= done.stderr.count("a second signal, SIGTERM, after SIGTERM: ends at once") <= NUM_RANKS


@pytest.mark.thorough
def test_a_rank_may_agree_to_end_without_a_signal(start) -> None:
    ranks = start("agreed also")
    assert ranks.statuses() == [ExitStatus.STOPPED] * NUM_RANKS
    told = [(ranks.directory / f"agreed_{rank}").read_text() for rank in range(NUM_RANKS)]
    assert told == ["7 None"] * NUM_RANKS


def test_two_signals_end_a_run_at_once_but_not_the_same_one_twice(start) -> None:
    """Ranks that are inside a collective, which no Python handler would interrupt, too."""
    ranks = start("exchange")
    ranks.wait_until_ready()
    ranks.signal(signal.SIGTERM, 0, 1, 2)
    ranks.signal(signal.SIGTERM, 0, 1, 2)
    time.sleep(1.2)
    assert ranks.statuses(0) == [None] * NUM_RANKS
    began = time.monotonic()
    ranks.signal(signal.SIGSTOP, 1)  # the others wait in their collective
    time.sleep(0.3)
    ranks.signal(signal.SIGUSR1, 0, 2)
    ranks.signal(signal.SIGCONT, 1)
    ranks.signal(signal.SIGTERM, 1)
    assert ranks.statuses() == [ExitStatus.NOT_SAVED] * NUM_RANKS
    assert time.monotonic() - began < DEADLINE
    assert ranks.output.count(" after SIGTERM: ends at once, without a new checkpoint") == NUM_RANKS


@pytest.mark.parametrize("case", ["grace", "grace, unseen"])
def test_the_grace_ends(case: str, start) -> None:
    """Also for a rank whose own has not ended, and where torchrun has asked for exit codes before ranks see them."""
    ranks = start(case)
    ranks.wait_until_ready()
    began = time.monotonic()
    ranks.signal(signal.SIGTERM, 0, 1, 2)
    assert ranks.statuses() == [ExitStatus.NOT_SAVED] * NUM_RANKS
    assert time.monotonic() - began >= faults_worker.GRACE
    told = ranks.output.count("SIGTERM came 1.5 s ago (checkpoint.grace_seconds)")
    assert 1 <= told <= NUM_RANKS - 1, "one that sees another end first has nothing to say"
