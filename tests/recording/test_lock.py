"""The lock of a run's directory: whom it keeps out, and which locks keep nobody out."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybridflow.errors import RunDirError, RunTakenError
from hybridflow.recording.lock import Holder, RunLock
from hybridflow.recording.recorder import record_run
from hybridflow.recording.starts import read_starts
from tests.recording.test_resume import config

pytestmark = pytest.mark.slow  # waits for processes

HOLDS = "import sys; from pathlib import Path; from hybridflow.recording.lock import RunLock; "
HOLDS += "lock = RunLock(Path(sys.argv[1])); lock.take(); print('held', flush=True); sys.stdin.read(); lock.release()"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "mine"


@pytest.fixture
def other(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def written(run_dir: Path, holder: Holder, *, seconds_ago: float = 0.0) -> Path:
    """A lock as a process has left it that gave its last sign so long ago."""
    file = run_dir.with_name(f".{run_dir.name}.lock")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(holder)))
    then = time.time() - seconds_ago
    os.utime(file, (then, then))
    return file


def elsewhere(**changes: object) -> Holder:
    """Of another machine, where this process's pid and start time are another process's."""
    return replace(Holder.here(), **{"machine": "another boot pid:[1]", "host": "node7", **changes})


def holder_of(lock: RunLock) -> Holder:
    return Holder(**json.loads(lock.file.read_text()))


@pytest.mark.thorough
def test_the_second_process_is_refused_by_name_until_the_first_has_ended(
    run_dir: Path, other: subprocess.Popen
) -> None:
    lock = RunLock(run_dir)
    with pytest.raises(RunDirError) as refused:
        lock.take()
    for part in (f"{run_dir}: is in use by pid {other.pid} on {socket.gethostname()} since 2", "name=", str(lock.file)):
        assert part in str(refused.value)
    other.communicate("")
    assert not lock.file.exists()
    lock.take()
    assert holder_of(lock).pid == os.getpid()
    lock.release()


@pytest.mark.parametrize("asked_about", [True, False], ids=["gone", "zombie"])
def test_a_killed_process_of_this_machine_holds_nothing(
    asked_about: bool, run_dir: Path, other: subprocess.Popen
) -> None:
    other.kill()
    if asked_about:
        other.wait()
    else:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    lock = RunLock(run_dir)
    lock.take()
    assert holder_of(lock).pid == os.getpid()
    lock.release()


def test_a_pid_that_another_process_has_got_holds_nothing(run_dir: Path) -> None:
    own = Holder.here()
    written(run_dir, replace(own, start_time=own.start_time - 1))
    lock = RunLock(run_dir)
    lock.take()
    assert holder_of(lock).pid == os.getpid()


def test_restarted_ranks_wait_for_those_before_them_to_end(run_dir: Path, other: subprocess.Popen) -> None:
    ends = threading.Timer(0.3, other.kill)
    ends.start()
    lock = RunLock(run_dir)
    lock.take(patience=60)
    assert holder_of(lock).pid == os.getpid()


def test_a_lock_of_another_machine_that_is_renewed_keeps_others_out(run_dir: Path) -> None:
    file, done = written(run_dir, elsewhere(pid=4711)), threading.Event()

    def give_signs() -> None:
        while not done.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=give_signs)
    thread.start()
    try:
        with pytest.raises(RunDirError, match=r"in use by pid 4711 on node7"):
            RunLock(run_dir, sign=0.05, silence=60).take()
    finally:
        done.set()
        thread.join()


def test_a_lock_of_another_machine_that_is_silent_locks_nobody_out(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after kill -9 of a job that is queued again, on another host or after a reboot of this one."""
    written(run_dir, elsewhere(), seconds_ago=100)
    lock = RunLock(run_dir)
    began = time.monotonic()
    lock.take()  # at once: longer silent than a holder ever is
    assert time.monotonic() - began < 30 and caplog.messages == []
    lock.release()
    written(run_dir, elsewhere())
    lock = RunLock(run_dir, sign=0.1, silence=1)
    lock.take()
    assert "node7" in caplog.messages[0] and "waits up to 1 s" in caplog.messages[0]
    assert holder_of(lock).pid == os.getpid()


def test_a_clock_that_is_behind_takes_no_lock_from_anybody(run_dir: Path) -> None:
    """A lock of the future, as another machine's clock may have given it: it is waited for like any other."""
    file = written(run_dir, elsewhere(), seconds_ago=-1000)
    signs = threading.Timer(0.2, os.utime, [file])
    signs.start()
    with pytest.raises(RunDirError, match="node7"):
        RunLock(run_dir, sign=0.05, silence=60).take()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}'])
def test_a_lock_that_names_nobody_is_stale_when_it_is_silent(text: str, run_dir: Path) -> None:
    file = written(run_dir, elsewhere())
    file.write_text(text)
    os.utime(file, (1, 1))
    lock = RunLock(run_dir)
    lock.take()
    assert holder_of(lock).pid == os.getpid()


def test_a_holder_gives_signs(run_dir: Path) -> None:
    lock = RunLock(run_dir, sign=0.05)
    lock.take()
    os.utime(lock.file, (1, 1))
    until = time.monotonic() + 60
    while lock.file.stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert lock.file.stat().st_mtime > 1
    lock.release()


def test_who_was_taken_for_gone_ends_and_leaves_the_lock_to_the_other(run_dir: Path) -> None:
    lock = RunLock(run_dir)
    lock.take()
    lock.check()
    written(run_dir, elsewhere(pid=4711))
    with pytest.raises(RunTakenError, match=r"mine: pid 4711 on node7"):
        lock.check()
    lock.release()
    assert holder_of(lock).pid == 4711


def test_of_two_that_take_a_stale_lock_at_once_one_has_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has looked before, and takes it after: the first sees that before it has written anything."""
    written(run_dir, elsewhere(), seconds_ago=100)
    lock = RunLock(run_dir)
    monkeypatch.setattr(time, "sleep", lambda seconds: written(run_dir, elsewhere(pid=4711)))
    with pytest.raises(RunTakenError, match="pid 4711"):
        lock.take()
    lock.release()
    assert holder_of(lock).pid == 4711


def test_a_lock_that_was_removed_is_there_again(run_dir: Path) -> None:
    lock = RunLock(run_dir)
    lock.take()
    lock.file.unlink()
    lock.check()
    assert holder_of(lock).pid == os.getpid()
    lock.release()
    assert not lock.file.exists()


def test_a_process_may_take_its_own_lock_again(run_dir: Path) -> None:
    first, second = RunLock(run_dir), RunLock(run_dir)
    first.take()
    second.take()
    second.check()
    second.release()
    assert first.file.exists(), "it is the first one's to remove"
    first.release()
    assert not first.file.exists()


def test_nothing_is_left_of_a_start_that_wrote_nothing(run_dir: Path, tmp_path: Path) -> None:
    lock = RunLock(run_dir)
    lock.take()
    assert [path.name for path in run_dir.parent.iterdir()] == [".mine.lock"], "not in the directory, which may move"
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_directory_is_anothers_writes_nothing_there(tmp_path: Path) -> None:
    c = config(tmp_path)

    def taken() -> None:
        raise RunTakenError("by another")

    with pytest.raises(RunTakenError), record_run(c, 5, rank=0, decode=str, check_lock=taken):
        raise AssertionError("it began")
    assert not c.run_dir.exists()
    checks = iter([lambda: None, taken])
    with (
        pytest.raises(RunTakenError),
        record_run(c, 5, rank=0, decode=str, check_lock=lambda: next(checks)()) as recorder,
    ):
        recorder.sync()
    [start] = read_starts(c.run_dir)
    assert start.how is None, "the file is the other's: its next start has ended this one"
