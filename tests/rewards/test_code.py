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
from hybridflow.rewards.python_tests import deciding

pytestmark = pytest.mark.slow  # waits for processes

GOOD = "def f(x):\n    return x + 1\n"
TEST = "assert f(1) == 2"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
DEFINES = "def check(candidate):\n    assert candidate(1) == 2\n"


def passed(program: str, tests: Any = TEST, **limits: Any) -> float:
    (score,) = passes_tests(["p"], [program], {"tests": [tests]}, **{"cpu_seconds": 2, "memory_mib": 256} | limits)
    return score


FENCE = "```"
PROGRAM = "x = 2\n"
BLOCK = f"{FENCE}python\n{PROGRAM}{FENCE}"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (f"first\n{FENCE}\nx = 1\n{FENCE}\nthen {BLOCK} end", PROGRAM),
        ("x = 3", "x = 3"),
        (f"{FENCE}json\n{{}}\n{FENCE}\nso I write\n{BLOCK}\nas you wished", PROGRAM),
        (f"{BLOCK}\nIt prints\n{FENCE}\n3\n{FENCE}\nand needs\n{FENCE}bash\npip install x\n{FENCE}", PROGRAM),
        (f"{FENCE}python\nx = 1\n{FENCE}\nNo:\n{FENCE}\n{PROGRAM}{FENCE}", PROGRAM),
        (f"{FENCE}python\n{PROGRAM}{FENCE}python\nThis works because of x", PROGRAM),
        (f"{FENCE}python\nx = 1\n{FENCE}\nNo:\n{FENCE}python\n{PROGRAM}", PROGRAM),
        (f"{BLOCK}\nBetter:\n{FENCE}python\ndef f(", PROGRAM),
        (f"{FENCE}python\n{PROGRAM}{FENCE}\n{FENCE}\n", PROGRAM),
        (f"{FENCE}`python\ns = '''\n{FENCE}\n'''\n{FENCE}`", f"s = '''\n{FENCE}\n'''\n"),
        (f"{FENCE}python\nif x:\n    s = '''\n    {FENCE}\n'''\n{FENCE}", f"if x:\n    s = '''\n    {FENCE}\n'''\n"),
        (f"~~~python\n{PROGRAM}~~~\n{FENCE}text\n2\n{FENCE}", PROGRAM),
        (f"1. So:\n   {FENCE}python\n   {PROGRAM}   {FENCE}\n2. Done", PROGRAM),
        (f"- {FENCE}python\n  {PROGRAM}  {FENCE}", PROGRAM),
        (f"{FENCE}python\nx = 2{FENCE}", PROGRAM),
        (f"{FENCE} Python3\r\nx = 2\r\n{FENCE}\r\n", "x = 2\r\n"),
        (f'{FENCE}python title="a.py"\n{PROGRAM}{FENCE}', PROGRAM),
        (f"{FENCE}{{.python .numberLines}}\n{PROGRAM}{FENCE}", PROGRAM),
        (f"{FENCE}python:a.py\n{PROGRAM}{FENCE}", PROGRAM),
        (f"<think>{FENCE}python\nx = 1\n</think>\n{FENCE}\n{PROGRAM}{FENCE}", PROGRAM),
        (f"or {FENCE}python\nx = 1\n</think>\n{FENCE}\n{PROGRAM}{FENCE}", PROGRAM),
        (f"<think>I could write\n{BLOCK}\n", ""),
        (f"put it into {FENCE}marks{FENCE}", f"put it into {FENCE}marks{FENCE}"),
    ],
)
def test_the_last_block_of_python_is_the_program(response: str, expected: str) -> None:
    assert program_in(response) == expected


def test_a_block_that_the_prompt_has_begun() -> None:
    assert program_in(f"{PROGRAM}{FENCE}\nas you wished", f"Write it.\n{FENCE}python\n") == PROGRAM
    assert passed(f"Sure:\n{FENCE}python\n{GOOD}{FENCE}\nas you wished") == 1.0


@pytest.mark.parametrize("line", ["`" * 30_000 + "x`", "~" * 30_000 + "`", f"{FENCE}{' ' * 30_000}`"])
def test_a_line_of_marks_takes_no_time(line: str) -> None:
    started = time.process_time()
    assert program_in(line) == line
    assert time.process_time() - started < 1.0


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


@pytest.mark.parametrize(
    ("printed", "wanted", "expected"),
    [
        ("3", "3.0", 1.0),
        ("1 2.50\\n-0.0 \\n", "1.0 2.5\n0\n\n", 1.0),
        ("1e3", "1000", 1.0),
        ("9" * 2000, "9" * 2000, 1.0),
        ("3.1", "3", 0.0),
        ("2\\n1", "1\n2", 0.0),
        ("3\\n4", "3", 0.0),
        ("001", "1", 0.0),
        ("3/2", "1.5", 0.0),
        ("v1.0", "v1", 0.0),
        ("", "3", 0.0),
        ("3", "", 0.0),
    ],
)
def test_what_is_printed_is_compared_as_a_contest_does(printed: str, wanted: str, expected: float) -> None:
    test = {"inputs": ["1\r\n2"], "outputs": [wanted]}
    assert passed(f"assert len(input()) == 1\nprint('{printed}')", test) == expected
    if expected:
        assert passed(f"print('{printed}')\n1/0", test) == 0.0


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
        ([{"input": "1 2", "output": "3", "testtype": None}], ADDS),
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
        (DEFINES, "column entry_point"),
        (["import math", "pass"], "they fail for a wrong program by"),
        ("test = lambda: f(1) == 2", "they fail for a wrong program by"),
        ("print(f(1) == 2)", "they fail for a wrong program by"),
        ("f(1)", "they fail for a wrong program by"),
        ("assert True", "they fail for a wrong program by"),
        ("import doctest\ndoctest.testmod()", "they fail for a wrong program by"),
        ("try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('no')", "they fail for a wrong program by"),
        ("class T(__import__('unittest').TestCase):\n    pass", "they fail for a wrong program by"),
        (">>> f(1)\n", "they fail for a wrong program by"),
        ("def test_f(tmp_path):\n    assert f(1) == 2", "has test_f, which is async or has arguments"),
        ("class TestF:\n    def test(self):\n        assert f(1) == 2", "has the class TestF, which is no unittest"),
        ("import a_package_that_is_not_there\nassert f(1) == 2", "imports a_package_that_is_not_there, which is not"),
        ("print f(1)", "is no Python"),
    ],
)
def test_tests_that_would_test_nothing_are_refused(tests: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"column 'tests': .*{expected}"):
        passed("pass", tests)


@pytest.mark.parametrize(
    "tests",
    [
        DEFINES + "check(f)",
        "def check(candidate):\n    return candidate(1) == 2\ncheck(f)",
        CASE,
        CASE + "unittest.main(argv=['x'])",
        CASE.replace("import unittest", "from unittest import TestCase, main").replace("unittest.T", "T")
        + "if __name__ == '__main__':\n    main()",
        "def test_f():\n    assert f(1) == 2\n\ndef test_g():\n    f(2) == 3\n",
        "from solution import f as g\ndef test_f():\n    assert g(1) == 2",
        "Some words.\n\n    >>> f(1)\n    2\n",
        "f(1) == 2",
        "all(f(i) == i + 1 for i in range(3))",
        "assert (f(1) == 2, 'no')",
        "for i in range(3):\n    f(i) == i + 1 and not f(i) == i",
        "from __future__ import annotations\nimport sys\nsys.exit(0 if f(1) == 2 else 1)",
        ["def same(a, b):\n    assert a == b", "same(f(1), 2)"],
    ],
)
def test_tests_that_are_defined_or_compared_decide(tests: Any) -> None:
    assert [passed(program, tests) for program in (GOOD, "def f(x):\n    return x\n")] == [1.0, 0.0]


def test_a_check_is_called_with_the_rows_entry_point() -> None:
    columns = {"tests": [DEFINES] * 2, "entry_point": ["f", "g"]}
    assert passes_tests(["p"] * 2, [GOOD] * 2, columns) == [1.0, 0.0]
    assert deciding(DEFINES, "tests", "f") is deciding(DEFINES, "tests", "f"), "read once for all responses to a prompt"


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
