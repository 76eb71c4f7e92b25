"""`hybridflow.rewards:passes_tests`: whether the Python program in a response passes the row's tests.

The program is the last fenced block of Python of what the response says after its thoughts, or all of that
(`rewards/code.py`). Tests are Python statements that run after it (a text, or a list of such;
`rewards/code_tests.py`), or {"inputs": [...], "outputs": [...]}: what it reads, and what it is to print; either also
as a JSON text (`rewards/code_tests.py`). Each test runs in a separate process (`rewards/code_runner.py`) with limits on
CPU seconds, memory and files.

These are limits, not a jail: a program can read and delete what the user can. Where Linux lets the user make namespaces
it has no network and sees no other processes; where not, that is said once, and `network: refuse` makes it an
error.

A block ends at a fence of the same character that is as long or longer, and has no language. A fence with a language in
a block begins the next one: the first was not closed. Models also begin a block behind words.
"""

import ast
import contextlib
import functools
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from hybridflow.rewards.code_tests import Case, cases
from hybridflow.rollout.thinking import behind_thoughts

RUNNER = Path(__file__).with_name("code_runner.py")
NUMBER = re.compile(r"(?<!\S)[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?(?!\S)")
MOST_DIGITS = 1000  # Python refuses to read numbers of more than 4300
WALL_FACTOR, WALL_SECONDS = 3.0, 5.0  # of the clock on the wall, for a program that sleeps: a machine may be busy
MOST_OUTPUT = 1 << 20  # bytes that are read of what a program prints
NO_NAMESPACES = 97  # exit status of the runner; see there


def passes_tests(
    prompts: list[str],
    responses: list[str],
    columns: dict[str, list[Any]],
    *,
    tests: str = "tests",
    entry_point: str = "entry_point",
    cpu_seconds: int = 10,
    memory_mib: int = 1024,
    file_mib: int = 16,
    partial: bool = False,
    network: Literal["refuse", "allow"] = "allow",
) -> list[float]:
    """1.0 where all tests pass, else 0.0; with `partial` the share that does. tests: the column.

    entry_point: the column, where there is one, with the function that tests of the form `check(candidate)` are for.
    network: what happens where no namespace can be made. Errors: ValueError for tests of another form, or of
    nothing.
    """
    limits = (cpu_seconds, memory_mib, file_mib)
    check_limits(limits, network)
    names = columns.get(entry_point, [None] * len(responses))
    return [
        _share(
            program_in(response, prompt), cases(given, tests, name), limits, partial=partial, refuse=network == "refuse"
        )
        for prompt, response, given, name in zip(prompts, responses, columns[tests], names, strict=True)
    ]


def _share(program: str, tests: Sequence[Case], limits: tuple[int, int, int], *, partial: bool, refuse: bool) -> float:
    passed = 0
    for case in tests:
        ok = _passes(program, case, limits, refuse=refuse)
        if not ok and not partial:
            return 0.0
        passed += ok
    return passed / len(tests)


def _passes(program: str, case: Case, limits: tuple[int, int, int], *, refuse: bool) -> bool:
    test, asked, wanted = case
    token = secrets.token_hex(16)  # sys.exit(0) before the tests is no pass
    ending = f"\n{test}\nprint('\\n{token}')\n" if wanted is None else "\n"
    status, printed, _ = run_confined(program + ending, asked, limits, seconds=wall_seconds(limits), refuse=refuse)
    if wanted is None:
        return printed.rstrip().endswith(token)
    return status == 0 and _lines(printed) == _lines(wanted)


def wall_seconds(limits: tuple[int, int, int]) -> float:
    """Of the clock on the wall, for a program with this limit of CPU seconds."""
    return WALL_FACTOR * limits[0] + WALL_SECONDS


def run_confined(
    program: str, asked: str, limits: tuple[int, int, int], *, seconds: float, refuse: bool
) -> tuple[int, str, str]:
    """(exit status, what it prints, what it prints on stderr) of a Python program. asked: the program's standard input.

    limits: CPU seconds, MiB of memory, MiB of a file. seconds: on the clock. refuse: PermissionError where no
    namespace can be made.
    """
    with tempfile.TemporaryDirectory(prefix="hybridflow-code-") as directory:
        Path(directory, "program.py").write_text(program, encoding="utf-8", errors="backslashreplace")
        command = [sys.executable, "-I", str(RUNNER), *map(str, limits), "refuse" if refuse else "allow"]
        status, printed, said = _run(command, directory, asked, seconds)
    if status == NO_NAMESPACES:
        raise PermissionError("network: refuse: this user may not make Linux namespaces here, so there is a network")
    if said.startswith("hybridflow:"):
        _say_once(said.splitlines()[0])
    return status, printed, said


def check_limits(limits: tuple[int, int, int], network: str) -> None:
    """Errors: ValueError naming the values and the rule."""
    if min(limits) < 1:
        raise ValueError(f"cpu_seconds, memory_mib and file_mib = {limits}: each is at least 1")
    if network not in ("refuse", "allow"):
        raise ValueError(f"network = {network!r} is neither refuse nor allow")


def _run(command: list[str], directory: str, asked: str, seconds: float) -> tuple[int, str, str]:
    """(status, stdout, stderr). What is left is killed, with the runner's namespace or process group."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error, tempfile.TemporaryFile() as given:
        given.write(asked.encode(errors="backslashreplace"))
        given.seek(0)
        process = subprocess.Popen(
            command, cwd=directory, stdin=given, stdout=out, stderr=error, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, error):
            file.seek(0)
            texts.append(file.read(MOST_OUTPUT).decode(errors="replace"))
    return status, texts[0], texts[1]


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def _lines(text: str) -> list[str]:
    """Without spaces at the ends of lines, and empty lines at the end. A number by itself is written in one way."""
    return [NUMBER.sub(_number, line.rstrip()) for line in text.rstrip().splitlines()]


def _number(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) > MOST_DIGITS else f"\0{Fraction(found[0])}"


# all of a run of marks, which is tried once: a line of 30,000 marks would take minutes
MARKS = r"(?<!`)`{3,}+|(?<!~)~{3,}+"
FENCE = re.compile(rf"(?P<before>.*?)(?P<fence>{MARKS})(?P<info>[\s{{.]*+(?P<language>[\w+#-]*+)[^`]*)")
NO_TEXT = re.compile(r"[ \t>]*(?:(?:[-*+]|[0-9]{1,3}[.)])[ \t]+)?")  # before a fence: margin, quote, mark of a list
LANGUAGE = re.compile(r"[ \t]*[A-Za-z][\w+#.:-]*")
PYTHON = re.compile(r"(?:python|py)[0-9]*", re.IGNORECASE)
BEGUN = re.compile(r"(?:`{3,}|~{3,})[ \t]*(?:python|py)[0-9]*[ \t]*\n\s*\Z", re.IGNORECASE)  # by the prompt


@dataclass
class FencedBlock:
    begin: re.Match[str]
    lines: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def text(self) -> str:
        return textwrap.dedent("".join(self.lines))

    @property
    def may_be_python(self) -> bool:
        """One without a language, or without an end, may be what a program prints, or words."""
        language = self.begin["language"]
        if not self.text.strip() or (language and not PYTHON.fullmatch(language)):
            return False
        return (self.closed and language != "") or _does_something(self.text)


def program_in(response: str, prompt: str = "") -> str:
    """The last block of Python behind the thoughts; without one all of that. Nothing where a thought does not end."""
    begun = BEGUN.search(prompt)
    said = behind_thoughts(response) or ""
    found = _blocks((begun[0] if begun else "") + said)
    return next((block.text for block in reversed(found) if block.may_be_python), said)


def _blocks(text: str) -> list[FencedBlock]:
    """In their order."""
    found = list[FencedBlock]()
    for line in text.splitlines(keepends=True):
        block = found[-1] if found and not found[-1].closed else None
        fence = FENCE.fullmatch(line.rstrip())
        if block and not (fence and _ends(fence, block.begin)):
            block.lines.append(line)
        elif fence and block:
            block.closed = True
            block.lines += [fence["before"] + "\n"] if fence["before"].strip() else []
            found += [FencedBlock(fence)] if LANGUAGE.fullmatch(fence["info"]) else []
        elif fence and _begins(fence):
            found.append(FencedBlock(fence))
    return found


def _begins(fence: re.Match[str]) -> bool:
    """At the beginning of a line with whatever behind it; behind words with a language at most."""
    bare = fence["fence"][0] == "`" and (not fence["info"] or LANGUAGE.fullmatch(fence["info"]))
    return bool(bare or NO_TEXT.fullmatch(fence["before"]))


def _ends(fence: re.Match[str], begin: re.Match[str]) -> bool:
    """Not deep within the text of a program; behind the last statement with nothing behind the fence."""
    if fence["before"].strip():
        return fence["fence"] == begin["fence"] and fence["fence"][0] == "`" and not fence["info"]
    return fence["fence"].startswith(begin["fence"]) and len(fence["before"]) <= len(begin["before"]) + 3


def _does_something(text: str) -> bool:
    """Whether it is Python with a statement or a call, and not what a program has printed."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        not isinstance(part, ast.Expr) or any(isinstance(node, ast.Call) for node in ast.walk(part)) for part in body
    )
