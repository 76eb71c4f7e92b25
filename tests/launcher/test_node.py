"""What runs on a host: real processes are started, signalled and killed through it, here without ssh."""

import json
import os
import queue
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.launcher.connection import Connection, Events
from hybridflow.launcher.hostfile import LaunchHost
from hybridflow.launcher.node import interface_of, listener
from tests.launcher.jobs import kill

pytestmark = pytest.mark.slow  # waits for processes

NUM_FUZZED = 1500
SECONDS = 60.0
# torchrun's place is taken by a program of that name's shape: a parent whose children are the ranks
PARENT = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True) for _ in range(2)]
print("started", *[child.pid for child in children], flush=True)
print("status", max(child.wait() for child in children), flush=True)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(600)
"""
# torchrun has a handler for SIGTERM, which ends it with 1
WITHOUT_RANKS = SAVES.replace("75", "1")
# Its rank has ended a second ago, and it has yet to notice.
SLOW_TO_NOTICE = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import sys, time; time.sleep(1.5); sys.exit(75)"])
status = rank.wait()
print("ended", flush=True)
time.sleep(2)
sys.exit(status)
"""


class Line:
    """A connection to a node on this machine, and what came."""

    def __init__(self) -> None:
        self.events: Events = queue.Queue()
        self.connection = Connection(LaunchHost("here", 1), sys.executable, None, self.events)
        self.came: list[dict[str, Any]] = []

    def until(self, key: str) -> Any:
        """The next message with that key."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            _, message = self.events.get(timeout=SECONDS)
            self.came.append(message)
            if key in message:
                return message[key]
        raise AssertionError(f"no {key}: {self.came[-10:]}")

    def start(self, *argv: str, grace: float = 20.0, **env: str) -> None:
        self.connection.send(do="start", argv=[sys.executable, *argv], env=env, directory="/", grace=grace)
        self.until("started")

    def ranks(self, program: str, **settings: Any) -> list[int]:
        """Their pids, once both have their handlers."""
        self.start("-c", PARENT, program, **settings)
        [pids] = {self.until("out") for _ in range(3)} - {"ready"}
        return [int(word) for word in pids.split()[1:]]


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    made.connection.send(do="facts", directory="/", code="/", files=[], lost_after=SECONDS)
    made.until("facts")
    yield made
    made.connection.close()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone(pids: list[int], seconds: float = 15.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_random_values_of_the_environment_arrive_unchanged(line: Line) -> None:
    dice = random.Random(0)
    letters = "\"'`$(){}[]<>|&;*?!~#\\= \t\n\r\x01\x1b\x7fé漢😀abc0"
    values = {f"HF_{i}": "".join(dice.choices(letters, k=dice.randint(0, 40))) for i in range(NUM_FUZZED)}
    line.start("-c", "import json, os; print(json.dumps(dict(os.environ)))", **values)
    told = json.loads(line.until("out"))
    assert {name: told[name] for name in values} == values
    assert "PYTEST_CURRENT_TEST" not in told and told["PATH"] == os.environ["PATH"]
    assert line.until("ended") == 0


def test_output_of_both_streams_and_the_status(line: Line) -> None:
    line.start("-c", "import sys; print('a\\nb'); print('\\xff', file=sys.stderr); sys.exit(70)")
    assert line.until("ended") == 70
    assert [message["out"] for message in line.came if "out" in message] == ["a", "b"]
    assert [message["err"] for message in line.came if "err" in message] == ["\xff"]


def test_a_command_that_is_not_there(line: Line) -> None:
    line.connection.send(do="start", argv=["/none/python"], env={}, directory="/", grace=1)
    assert "No such file or directory: '/none/python'" in line.until("error")


def test_signals_go_to_the_ranks_whose_status_is_told(line: Line) -> None:
    ranks = line.ranks(SAVES)
    line.connection.send(do="signal", number=int(signal.SIGTERM))
    assert line.until("out") == "status 75" and line.until("ended") == 0
    assert gone(ranks)


def test_a_torchrun_whose_ranks_have_just_ended_is_told_nothing(line: Line) -> None:
    line.start("-c", SLOW_TO_NOTICE)
    assert line.until("out") == "ended"
    line.connection.send(do="signal", number=int(signal.SIGTERM))
    assert line.until("ended") == 75


@pytest.mark.parametrize("program", [WITHOUT_RANKS, STUBBORN])
def test_a_torchrun_that_has_no_ranks_yet_ends_by_the_signal(program: str, line: Line) -> None:
    """Also where it does not hear it, since it waits in native code for other nodes."""
    line.start("-c", program)
    assert line.until("out") == "ready"
    line.connection.send(do="signal", number=int(signal.SIGTERM))
    assert line.until("ended") == -signal.SIGTERM


def test_a_sigterm_for_all_processes_of_a_host_ends_the_ranks_alone(line: Line) -> None:
    ranks = line.ranks(SAVES)
    kill([parent_of(parent_of(ranks[0])), *ranks], signal.SIGTERM)
    assert line.until("out") == "status 75" and line.until("ended") == 0


def test_what_does_not_end_is_killed(line: Line) -> None:
    ranks = line.ranks(STUBBORN)
    line.connection.send(do="kill")
    assert line.until("ended") == -signal.SIGKILL
    assert gone(ranks)


def test_ranks_of_a_killed_torchrun_are_killed(line: Line) -> None:
    ranks = line.ranks(STUBBORN)
    [parent] = {parent_of(rank) for rank in ranks}
    kill([parent])
    assert line.until("ended") == -signal.SIGKILL
    assert gone(ranks)


def test_without_a_launcher_the_ranks_may_save_and_are_then_killed(line: Line) -> None:
    """Its stdin ends."""
    ranks = line.ranks(STUBBORN, grace=1.0)
    began = time.monotonic()
    line.connection.close()
    assert gone(ranks) and time.monotonic() - began > 1.0


def test_a_launcher_that_says_nothing_is_gone() -> None:
    line = Line()
    line.connection.send(do="facts", directory="/", code="/", files=[], lost_after=3.0)
    ranks = line.ranks(SAVES)
    began = time.monotonic()
    assert gone(ranks) and time.monotonic() - began > 1.5
    line.connection.close()


def test_a_listener_is_told_from_another_and_its_port_is_free_again(line: Line) -> None:
    line.connection.send(do="listen", port=0, token="abc")
    port = line.until("listening")
    reach = {"do": "reach", "address": "127.0.0.1", "port": port, "seconds": 0.5}
    line.connection.send(**reach, token="abc")
    assert line.until("reached") == "lo"
    line.connection.send(**reach, token="xyz")
    assert line.until("error") == "something else answers there: 'abc'"
    line.start("-c", f"import socket; socket.create_server(('', {port})); print('mine')")
    assert line.until("out") == "mine"
    line.connection.send(**reach, token="abc")
    assert "Connection refused" in line.until("error")


def test_a_port_that_is_taken(line: Line) -> None:
    with listener(0) as taken:
        line.connection.send(do="listen", port=taken.getsockname()[1], token="abc")
        assert "Address already in use" in line.until("error")


def test_interfaces_by_address() -> None:
    assert interface_of("127.0.0.1") == "lo" == interface_of("::ffff:127.0.0.1")
    assert interface_of("192.0.2.1") is None  # of documentation, RFC 5737
    assert socket.if_nametoindex("lo")


def test_facts(tmp_path: Path) -> None:
    """Of a directory with a code of one file, and of a missing one."""
    (tmp_path / "hybridflow").mkdir()
    (tmp_path / "hybridflow" / "a.py").write_text("1")
    (tmp_path / "config.yaml").write_text("name: x")
    line = Line()
    request = {"do": "facts", "code": str(tmp_path), "files": ["config.yaml", "none"], "lost_after": SECONDS}
    line.connection.send(**request, directory=str(tmp_path))
    facts = line.until("facts")
    assert facts["alike"]["Python"] == sys.version.split()[0] and len(facts["alike"]["the code of hybridflow"]) == 12
    assert len(facts["alike"]["the file config.yaml"]) == 12
    assert facts["alike"]["the file none"] == "none: No such file or directory"
    assert facts["gpus"] == [] and facts["addresses"] == []
    (tmp_path / "hybridflow" / "a.py").write_text("2")
    line.connection.send(**request, directory=str(tmp_path))
    assert line.until("facts")["alike"]["the code of hybridflow"] != facts["alike"]["the code of hybridflow"]
    line.connection.send(**request, directory="/none")
    assert line.until("error") == "--directory /none: No such file or directory"
    line.connection.close()
