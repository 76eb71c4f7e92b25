"""What /proc says of processes that really stop, end and crash."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.parallel.peer_processes import (
    Condition,
    Peer,
    Wake,
    condition,
    kill,
    out_of_memory_kills,
    this_process,
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    """Its name has what /proc/PID/stat separates its fields by."""
    code = "open('/proc/self/comm', 'w').write('a) b (c'); print(flush=True); import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def peer_of(process: subprocess.Popen) -> Peer:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return replace(this_process(1), pid=process.pid, start_time=int(fields[22 - 3]))


def zombie(process: subprocess.Popen) -> Condition:
    until = time.monotonic() + 10
    while not condition(peer_of(process)).ended:
        assert time.monotonic() < until
        time.sleep(0.01)
    return condition(peer_of(process))


def test_this_process_runs() -> None:
    own = this_process(3)
    assert (own.rank, own.pid) == (3, os.getpid())
    assert condition(own) == Condition("R")


def test_a_stopped_process_has_not_ended(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert condition(peer_of(child)) == Condition("T") and not condition(peer_of(child)).ended


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV])
def test_the_signal_is_known_until_the_parent_asks(sign: signal.Signals, child: subprocess.Popen) -> None:
    peer = peer_of(child)
    child.send_signal(sign)
    assert zombie(child) == Condition("Z", signal=sign)
    assert condition(peer).cause == f"killed by {sign.name}"
    child.wait()
    assert condition(peer) == Condition(None)
    assert condition(peer).ended and condition(peer).cause == "cause not seen from here"


def test_an_exit_code_is_known_until_the_parent_asks() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(70)"])
    assert zombie(process) == Condition("Z", exit_code=70)
    process.wait()


def test_another_process_of_that_pid_is_not_killed(child: subprocess.Popen) -> None:
    other = replace(peer_of(child), start_time=peer_of(child).start_time - 1)
    assert condition(other) == Condition(None)
    assert not kill(other) and child.poll() is None
    assert kill(peer_of(child)) and child.wait() == -signal.SIGKILL


def test_an_end_wakes_who_sleeps(child: subprocess.Popen) -> None:
    wake = Wake([peer_of(child)])
    began = time.monotonic()
    child.kill()
    wake.sleep(20)
    assert time.monotonic() - began < 5
    began = time.monotonic()
    wake.sleep(0.2)  # once only
    assert time.monotonic() - began >= 0.19
    wake.close()


def test_the_kernels_count_of_kills_is_read_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of either version of control groups, in files as the kernel writes them."""
    files = {
        "/proc/self/cgroup": "0::/job\n",
        "/sys/fs/cgroup/job/memory.events": "low 0\nhigh 3\nmax 5\noom 2\noom_kill 2\noom_group_kill 0\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, **named: files[str(path)])
    assert out_of_memory_kills() == 2
    files["/proc/self/cgroup"] = "4:memory:/job\n0::/\n"
    files["/sys/fs/cgroup/memory/job/memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    assert out_of_memory_kills() == 4
