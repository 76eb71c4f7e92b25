"""What a config's functions are, told by a process that imports their modules and ends: the trainer imports none.

A module may set signals' handlers, load a model or start threads when it is imported; that belongs into the workers.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.functions import check_arguments, is_async, load_reward_function
from hybridflow.rewards.processes import adopt_orphans, children, end_with_parent, how, kill_tree, light_python

SECONDS = 600.0  # that all imports may take
OWN = "hybridflow.rewards."  # modules whose functions take no rows without a word: so their arguments are tried
Wanted = tuple[str, Mapping[str, Any]]  # package.module:function, and what it is to be called with by keyword


@dataclass(frozen=True)
class Described:
    """awaited: whether it is an `async def`. file: of its module."""

    awaited: bool
    file: str | None


def described(wanted: Sequence[Wanted]) -> list[Described]:
    """Of each function. Errors: RewardError, with a line for each that cannot be found or called so."""
    if not wanted:
        return []
    paths = [path for path, _ in wanted]
    process = subprocess.Popen(
        light_python("hybridflow.rewards.probe", os.getpid()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(json.dumps([list(one) for one in wanted]).encode(), SECONDS)
    except subprocess.TimeoutExpired:
        raise RewardError(f"reward functions were not imported within {SECONDS:g} s: {', '.join(paths)}") from None
    finally:
        _end(process)
    told = [json.loads(line) for line in out.splitlines()]
    problems = [one["problem"] for one in told if one["problem"]]
    if problems:
        raise RewardError("\n".join(dict.fromkeys(problems)))
    if len(told) < len(wanted):
        path = wanted[len(told)][0]
        raise RewardError(
            f"reward function {path}: the process that imports {path.partition(':')[0]} did not answer: it "
            f"{how(process.returncode)}"
        )
    return [Described(one["awaited"], one["file"]) for one in told]


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it has started."""
    if process.poll() is None:
        kill_tree(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(parent: int) -> None:
    """The process: a line of JSON for each function. What is printed meanwhile goes to stderr."""
    end_with_parent(parent)
    adopt_orphans()
    told = os.dup(1)
    os.dup2(2, 1)
    for path, arguments in json.loads(sys.stdin.buffer.read()):
        os.write(told, json.dumps(_told(path, arguments)).encode() + b"\n")
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
    return {"problem": "", "awaited": awaited, "file": file}


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
