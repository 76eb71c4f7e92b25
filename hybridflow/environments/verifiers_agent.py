"""Episodes of a verifiers environment as an agent, by the Python that verifiers is installed in.

    data.environment: {verifiers: guess_env, python: /envs/verifiers/bin/python}

verifiers needs other releases of packages than vLLM, so that it has an environment of its own. Each worker process has
one process of that Python (`verifiers_runner.py`), in which all of the worker's episodes run. It plays the task whose
number a row's column `task` has, and gives the reward.
"""

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hybridflow.environments.agents import PREPARE
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.specs import word_of

KEY = "data.environment.verifiers"
TASK = "task"  # the column with a task's number
RUNNER = Path(__file__).with_name("verifiers_runner.py")
LOAD_SECONDS = 300.0  # that the import of verifiers and the environment may take
LONGEST_LINE = 1 << 26  # bytes of an answer


def number_of_tasks(name: str, python: str, arguments: Mapping[str, Any]) -> int | None:
    """How many tasks the environment has; None of one without an end. Errors: ConfigError where it does not load."""
    try:
        ran = subprocess.run(
            _command(name, python, arguments, "check"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOAD_SECONDS,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"data.environment.python = {python}: does not start: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{KEY} = {name}: was not loaded in {LOAD_SECONDS:g} s") from error
    found = _told(ran.stdout.partition(b"\n")[0])
    if found is None:
        last = ran.stderr.decode(errors="backslashreplace").strip().splitlines()[-1:]
        raise ConfigError(f"{KEY} = {name}: {python} ended with status {ran.returncode}: {''.join(last) or 'no word'}")
    if found["problem"]:
        raise ConfigError(f"{KEY} = {name}: {found['problem']}")
    number: int | None = found["tasks"]
    return number


def task_problem(columns: Mapping[str, Any], num_tasks: int | None) -> str:
    """Why a row names no task; nothing where it does."""
    number = columns.get(TASK)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        given = f"is {number!r}" if TASK in columns else "is missing"
        return f"the column {TASK} {given}; a row has the number of a task of verifiers, from 0"
    if num_tasks is not None and number >= num_tasks:
        return f"the column {TASK} is {number}; the environment has tasks 0 to {num_tasks - 1}"
    return ""


class Runner:
    """The process of this worker. Errors of `play`: RewardError."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._calls, self._asked = process, dict[int, asyncio.Future[dict[str, Any]]](), 0
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def started(cls, name: str, python: str, arguments: Mapping[str, Any]) -> Self:
        """Errors: RewardError where the environment does not load."""
        process = await asyncio.create_subprocess_exec(
            *_command(name, python, arguments, "play"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LONGEST_LINE,
        )
        assert process.stdout is not None
        found = _told(await process.stdout.readline())
        if found is None or found["problem"]:
            raise RewardError(f"{KEY} = {name}: {found['problem'] if found else 'its process has ended'}")
        return cls(process)

    @property
    def has_ended(self) -> bool:
        """Whether the process answers no more."""
        return self._reading.done()

    async def play(self, task: int, base_url: str, key: str) -> dict[str, Any]:
        """The episode of a task: reward and scores."""
        number, self._asked = self._asked, self._asked + 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._send({"call": number, "task": task, "base_url": base_url, "key": key})
        try:
            found = await answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._calls.pop(number, None)
        if found["problem"]:
            raise RewardError(found["problem"])
        return found

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(message) + "\n").encode())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            found = json.loads(line)
            if (answer := self._calls.get(found["call"])) is not None and not answer.done():
                answer.set_result(found)
        ended = {"problem": f"the process of verifiers has ended with status {await self._process.wait()}"}
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result(ended)


_runners: dict[str, "asyncio.Task[Runner]"] = {}  # of this process


async def run(
    base_url: str,
    row: Mapping[str, Any],
    *,
    name: str,
    python: str,
    arguments: Mapping[str, Any],
    parts: Sequence[str] = (),
    token_file: str | None = None,
) -> float | dict[str, float]:
    """An agent's row, as `environments.agents` calls it: the reward, or the scores that are called as the parts.

    Errors: RewardError where the episode has failed.
    """
    key = "-" if token_file is None else word_of(token_file, "data.environment.token_file")
    runner = await _runner(name, python, arguments)
    found = await runner.play(row[TASK], base_url, key)
    if not parts:
        return float(found["reward"])
    missing = [part for part in parts if part not in found["scores"]]
    if missing:
        raise RewardError(
            f"data.environment.parts.{missing[0]}: no reward of the environment has this name; there are "
            f"{', '.join(found['scores']) or 'none'}"
        )
    return {part: found["scores"][part] for part in parts}


async def _runner(name: str, python: str, arguments: Mapping[str, Any]) -> Runner:
    """That of this process; a new one where it has ended. Errors: RewardError where the environment does not load."""
    command = json.dumps([name, python, arguments])
    if command not in _runners or _is_lost(_runners[command]):
        _runners[command] = asyncio.ensure_future(Runner.started(name, python, arguments))
    return await asyncio.shield(_runners[command])


async def _prepare(*, name: str, python: str, arguments: Mapping[str, Any], **others: Any) -> None:
    """Load the environment."""
    await _runner(name, python, arguments)


setattr(run, PREPARE, _prepare)


def _is_lost(starting: "asyncio.Task[Runner]") -> bool:
    """Whether the process did not start, or has ended: the next row gets another one."""
    return starting.done() and (starting.exception() is not None or starting.result().has_ended)


def _command(name: str, python: str, arguments: Mapping[str, Any], how: str) -> list[str]:
    return [python, "-P", str(RUNNER), name, json.dumps(dict(arguments)), how]


def _told(line: bytes) -> dict[str, Any] | None:
    """The runner's first line; None where it has ended without one."""
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found
