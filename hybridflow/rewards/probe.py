"""What a config's functions are: a process imports their modules, says so and ends. The trainer imports none.

A module may set signals' handlers, load a model or start threads when it is imported; that belongs into the workers.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.parallel.child_processes import adopt_orphans, children, end_with_parent, how, kill_tree, light_python
from hybridflow.rewards.functions import asked_of, check_arguments, is_async, load_reward_function

SECONDS = 600.0  # that all imports may take
OWN = "hybridflow.rewards."  # modules whose functions take no rows without a word: so their arguments are tried
Wanted = tuple[str, Mapping[str, Any]]  # package.module:function, and what it is to be called with by keyword


@dataclass(frozen=True)
class Described:
    """awaited: whether it is an `async def`. file: of the module. asks: see `FunctionSpec`."""

    awaited: bool
    file: str | None
    asks: tuple[str, ...]


def described(wanted: Sequence[Wanted]) -> list[Described]:
    """Of each function. Errors: RewardError, with a line for each that cannot be found or called so."""
    if not wanted:
        return []
    told = asked("hybridflow.rewards.probe", [list(one) for one in wanted], "reward function")
    problems = [one["problem"] for one in told if one["problem"]]
    if problems:
        raise RewardError("\n".join(dict.fromkeys(problems)))
    return [Described(one["awaited"], one["file"], tuple(one["asks"])) for one in told]


def asked(
    module: str, wanted: Sequence[list[Any]], what: str, *, seconds: float | None = SECONDS
) -> list[dict[str, Any]]:
    """The answers of a process that calls `main` of the module, one for each that is wanted, whose first is a path.

    Errors: RewardError where it does not answer. what: they are, for messages. seconds: None: as long as it takes.
    """
    paths = [one[0] for one in wanted]
    process = subprocess.Popen(
        light_python(module, os.getpid()), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        out, _ = process.communicate(json.dumps(wanted).encode(), seconds)
    except subprocess.TimeoutExpired:
        raise RewardError(f"{what}s were not imported within {seconds:g} s: {', '.join(paths)}") from None
    finally:
        _end(process)
    told: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    problem = any(one["problem"] for one in told)
    if len(told) < len(wanted) and not problem:
        path = wanted[len(told)][0]
        raise RewardError(
            f"{what} {path}: the process that imports {path.partition(':')[0]} did not answer: it "
            f"{how(process.returncode)}"
        )
    return told


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it has started."""
    if process.poll() is None:
        kill_tree(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(parent: int) -> None:
    """The process."""
    serve(parent, _told)


def serve(parent: int, told: Callable[[str, Mapping[str, Any]], dict[str, Any]]) -> None:
    """A line of JSON for each that is wanted. What is printed meanwhile goes to stderr."""
    end_with_parent(parent)
    adopt_orphans()
    out = os.dup(1)
    os.dup2(2, 1)
    for path, arguments in json.loads(sys.stdin.buffer.read()):
        os.write(out, json.dumps(told(path, arguments)).encode() + b"\n")
    for child in children(os.getpid()):
        kill_tree(child)
    os._exit(0)


def _told(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        function = load_reward_function(path)
        check_arguments(function, path, arguments)
        awaited = is_async(function)
        if not awaited and getattr(function, "__module__", "").startswith(OWN):
            _try_without_rows(function, path, arguments)
    except RewardError as error:
        return {"problem": str(error)}
    file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    return {"problem": "", "awaited": awaited, "file": file, "asks": asked_of(function, arguments)}


def _try_without_rows(function: Any, path: str, arguments: Mapping[str, Any]) -> None:
    """Have a shipped function refuse values of arguments that it cannot use."""
    try:
        function([], [], _NoRows(), **arguments)
    except (ValueError, TypeError) as error:
        raise RewardError(f"reward function {path}: arguments {dict(arguments)}: {error}") from error


class _NoRows(dict[str, list[Any]]):
    """Columns of a batch without rows, by any name."""

    def __missing__(self, name: str) -> list[Any]:
        return []
