"""starts.jsonl of a run directory: a line where the run starts, and a line where this start ends, by rank 0.

    {"began": 1.7e9, "command": "hybridflow train x.yaml", "versions": {...}, "commit": ..., "process": [...]}
    {"ended": 1.7e9, "how": "finished", "why": ""}

A run that resumes adds lines. Without an end the process runs, was killed, or left from another thread.
"""

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hybridflow import __version__
from hybridflow.errors import RecordError, RunTakenError, Stopped
from hybridflow.parallel import torchrun
from hybridflow.parallel.diagnosis import lost_peer
from hybridflow.parallel.peer_processes import this_process
from hybridflow.parallel.versions import installed_version, source_commit
from hybridflow.recording.run_dir import writing

STARTS = "starts.jsonl"
PACKAGES = ("torch", "megatron-core", "vllm", "transformers")
TORCHRUN = re.compile(r"(^|/)torchrun$|^torch\.distributed\.run$")
ANOTHER_RANK = "another rank ended first, see logs/rank_*.log"
End = Literal["finished", "stopped", "failed", "lost"]
ENDS: tuple[End, ...] = ("finished", "stopped", "failed", "lost")


@dataclass(frozen=True)
class RunStart:
    """One start of a run. Times are seconds since 1970. `ended` and `how` are None where no end is recorded.

    process: of rank 0: (machine, pid, start time), as `hybridflow.parallel.peer_processes` tells processes apart.
    how: `lost` is written by the next start, for a start that has ended and written no line.
    """

    began: float
    command: str
    versions: Mapping[str, str]  # by package, hybridflow first
    commit: str | None  # of hybridflow's source, where that is a git checkout
    process: tuple[str, int, int]
    ended: float | None = None
    how: End | None = None
    why: str = ""


@contextlib.contextmanager
def recorded_start(run_dir: Path) -> Iterator[None]:
    """Record the start of the run and how the block ends. Enter it before metrics.csv is written to."""
    file = run_dir / STARTS
    former = read_starts(run_dir)
    if former and former[-1].ended is None:
        _append(file, {"ended": last_sign(run_dir, former[-1]), "how": "lost", "why": ""})
    _append(file, _began())
    try:
        yield
    except Stopped as stopped:
        _append_end(file, "stopped", str(stopped))
        raise
    except RunTakenError:  # the file is another process's
        raise
    except BaseException as error:
        _append_end(file, "failed", _why(error))
        raise
    _append_end(file, "finished", "")


def read_starts(run_dir: Path) -> list[RunStart]:
    """In their order; none where the file is not there. A line that is none of ours, or cut short, is passed over."""
    file = run_dir / STARTS
    starts: list[RunStart] = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            tree = json.loads(line)
            if "began" in tree:
                starts.append(_start(tree))
            elif starts and tree["how"] in ENDS:
                end = float(tree["ended"]), tree["how"], str(tree["why"])
                starts[-1] = replace(starts[-1], ended=end[0], how=end[1], why=end[2])
    return starts


def last_sign(run_dir: Path, start: RunStart) -> float:
    """When a start without an end was last seen to write a row, in seconds since 1970."""
    with contextlib.suppress(OSError):
        return max(start.began, (run_dir / "metrics.csv").stat().st_mtime)
    return start.began


def typed_command(words: Sequence[str], *, by_command: bool, is_rank: bool, parent: Sequence[str] = ()) -> str:
    """The command of a process as a person has typed it. words: the process's own, the interpreter first.

    parent: words of the process that has started this one: torchrun's, for a rank. Where these are not known, dots
    stand for torchrun's options.
    """
    words = list(words[1:])
    while words and words[0] in ("-u", "-I", "-P", "-s", "-E", "-B"):
        del words[0]
    if by_command:  # python -m hybridflow.train --fetched CONFIG ...
        return shlex.join(["hybridflow", "train", *(word for word in words[2:] if word != "--fetched")])
    if is_rank:
        place = next((i for i, word in enumerate(parent) if TORCHRUN.search(word)), None)
        return f"torchrun ... {shlex.join(words)}" if place is None else shlex.join(["torchrun", *parent[place + 1 :]])
    if words and Path(words[0]).name.startswith("hybridflow"):
        return shlex.join([Path(words[0]).name, *words[1:]])
    return shlex.join(["python", *words])


def own_command() -> str:
    """Of this process, as a person has typed it."""
    parent: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
    by_command, is_rank = torchrun.is_by_command(), torchrun.is_rank()
    return typed_command(sys.orig_argv, by_command=by_command, is_rank=is_rank, parent=parent)


def _began() -> dict[str, Any]:
    process = this_process(0)
    found = {package: version for package in PACKAGES if (version := installed_version(package)) is not None}
    return {
        "began": time.time(),
        "command": own_command(),
        "versions": {"hybridflow": __version__, **found},
        "commit": source_commit(),
        "process": [process.machine, process.pid, process.start_time],
    }


def _start(tree: Mapping[str, Any]) -> RunStart:
    machine, pid, start_time = tree["process"]
    versions = {str(package): str(version) for package, version in tree["versions"].items()}
    return RunStart(
        began=float(tree["began"]),
        command=str(tree["command"]),
        versions=versions,
        commit=None if tree["commit"] is None else str(tree["commit"]),
        process=(str(machine), int(pid), int(start_time)),
    )


def _why(error: BaseException) -> str:
    if lost_peer(error):  # a broken connection: what broke it only the other rank knows
        return ANOTHER_RANK
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _append_end(file: Path, how: End, why: str) -> None:
    with contextlib.suppress(OSError, RecordError):  # a full disk must not hide how the run has ended
        _append(file, {"ended": time.time(), "how": how, "why": why})


def _append(file: Path, tree: Mapping[str, Any]) -> None:
    """The line break comes first too: a line that a crash has cut short ends there."""
    broken = file.exists() and not file.read_bytes().endswith(b"\n")
    with writing(file), file.open("ab") as lines:
        lines.write(b"\n" * broken + json.dumps(tree).encode() + b"\n")
