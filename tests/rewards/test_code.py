"""Programs and their tests: what passes, and what limits hold."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybridflow.rewards import code, passes_tests
from hybridflow.rewards.code import RUNNER, program_in

GOOD = "def f(x):\n    return x + 1\n"
TEST = "assert f(1) == 2"


def passed(program: str, tests: Any = TEST, **limits: Any) -> float:
    (score,) = passes_tests(["p"], [program], {"tests": [tests]}, **{"cpu_seconds": 2, "memory_mib": 256} | limits)
    return score


def test_the_last_block_is_the_program() -> None:
    assert program_in("first\n```\nx = 1\n```\nthen ```python\nx = 2\n``` end") == "x = 2\n"
    assert program_in("x = 3") == "x = 3"
    assert passed(f"Sure:\n```python\n{GOOD}```\nas you wished") == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n    return x\n",
        "def f(x) return",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "print('all tests passed')\nraise SystemExit",
        "",
    ],
)
def test_what_does_not_pass_scores_zero(program: str) -> None:
    assert passed(program) == 0.0


def test_some_of_several_tests() -> None:
    tests = [TEST, "assert f(2) == 4", "assert f(-1) == 0", "import math\nassert f(math.inf) == math.inf"]
    assert passed(GOOD, tests) == 0.0 and passed(GOOD, tests, partial=True) == 0.75


def test_what_a_program_reads_and_prints() -> None:
    tests = {"inputs": ["2\n", "3\n", "x"], "outputs": ["4\n", "6 \n\n", "6"]}
    assert passed("print(int(input()) * 2)", tests, partial=True) == pytest.approx(2 / 3)


ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.mark.parametrize(
    ("tests", "right"),
    [
        (json.dumps(SUMS), ADDS),
        (json.dumps(json.dumps(SUMS)), ADDS),
        (SUMS | {"fn_name": None}, ADDS),
        ({"inputs": [["1 2"], "3 4"], "outputs": [["3"], "7"]}, ADDS),
        (json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}, {"input": "3 4", "output": "7"}]), ADDS),
        (json.dumps(ASSERTS), GOOD),
        ("[f(x) for x in (1, 2)] == [2, 3] or exit(1)", GOOD),
        (json.dumps(["import math", "assert f(1) == 2"]), GOOD),
    ],
)
def test_tests_as_a_json_text_decide_as_they_would_as_values(tests: Any, right: str) -> None:
    assert [passed(right, tests), passed("pass", tests)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (json.dumps({"fn_name": "twice", "inputs": [[1]], "outputs": [2]}), "fn_name = 'twice'.*assert twice"),
        ({"fn_name": "twice", "inputs": ["1"], "outputs": ["2"]}, "fn_name = 'twice'.*assert twice"),
        (json.dumps([{"input": "1", "output": "2", "testtype": "functional"}]), "testtype = 'functional'"),
        (json.dumps({"inputs": ["1", "2"], "outputs": ["2"]}), "2 inputs and 1 outputs"),
        (json.dumps({"asserts": ["assert f(1) == 2"]}), "inputs and outputs"),
        ("{'inputs': ['1'], 'outputs': ['2']}", "inputs and outputs"),
        ("42", "tests are a text"),
        ("", "tests are a text"),
    ],
)
def test_tests_that_would_test_nothing_are_refused(tests: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"column 'tests': .*{expected}"):
        passed("pass", tests)


@pytest.mark.parametrize("tests", ["while True: pass", "import os\nwhile True: os.getpid()"])
def test_cpu_seconds_end_a_program(tests: str) -> None:
    assert passed(GOOD, tests, cpu_seconds=1) == 0.0


def test_memory_and_files_have_limits() -> None:
    allocates, writes = "x = bytearray({} << 20)", "open('x', 'wb').write(bytes({} << 20))"
    assert [passed(GOOD + allocates.format(n), memory_mib=256) for n in (64, 512)] == [1.0, 0.0]
    assert [passed(GOOD + writes.format(n), file_mib=4) for n in (2, 8)] == [1.0, 0.0]


def test_a_program_ends_with_all_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of its own; with namespaces it does not see its user's other processes either."""
    monkeypatch.setattr(code, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(code, "WALL_SECONDS", 1.0)
    sleeps = (
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(987.5)'])\n"
    )
    assert passed(f"{GOOD}{sleeps}time.sleep(100)") == 0.0
    until = time.monotonic() + 10  # the end of a namespace takes a moment
    while any(b"time.sleep(987.5)" in read(file) for file in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < until
        time.sleep(0.01)


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_where_there_are_namespaces_there_is_no_network_and_nobody_to_kill() -> None:
    if subprocess.run(["unshare", "-Upn", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make namespaces here")
    connects = "import socket\nsocket.create_server(('127.0.0.1', 0))\nsocket.create_connection(('127.0.0.1', 9), 1)\n"
    reached = "try:\n    " + connects.replace("\n", "\n    ") + "pass\nexcept ConnectionRefusedError: pass\n"
    assert passed(GOOD + reached, network="refuse") == 0.0, "the loopback device is down"
    kills = "import os\ntry:\n    os.kill(-1, 9)\nexcept ProcessLookupError:\n    alone = True\nassert alone\n"
    assert passed(kills + GOOD, network="refuse") == 1.0


def test_where_there_are_none_it_is_said_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    without = tmp_path / "runner.py"
    without.write_text(RUNNER.read_text().replace("libc.unshare(", "(lambda flags: -1)("))
    monkeypatch.setattr(code, "RUNNER", without)
    code._say_once.cache_clear()
    assert [passed(GOOD), passed(GOOD)] == [1.0, 1.0]
    assert capsys.readouterr().err.count("programs run with the network, no namespaces can be made") == 1
    with pytest.raises(PermissionError, match="network: refuse: this user may not make Linux namespaces here"):
        passed(GOOD, network="refuse")


@pytest.mark.parametrize("tests", [None, [], [1], {"inputs": ["x"]}, {"inputs": [1], "outputs": [2]}, 5])
def test_tests_of_another_form_are_no_zero(tests: Any) -> None:
    with pytest.raises(
        ValueError, match=r"column 'tests': .* tests are a text, a list of texts, or inputs and outputs"
    ):
        passed(GOOD, tests)


def test_limits_that_are_none_are_told() -> None:
    for wrong in ({"cpu_seconds": 0}, {"memory_mib": 0}, {"network": "none"}):
        with pytest.raises(ValueError, match=r"at least 1|neither refuse nor allow"):
            passes_tests([], [], {"tests": []}, **wrong)


def test_the_runner_needs_nothing_of_hybridflow() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'hybridflow' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", code, str(RUNNER)], check=True)
