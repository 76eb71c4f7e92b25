"""The first hour on a node of 8 GPUs, in steps that do not end each other: `tests.gpu.node_steps`.

python -m tests.gpu node [STEP ...] [--out FILE] [--tiny]

Each step is a process of its own with a time limit. The report is one Markdown file, written anew after each step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tests.forks import ROOT
from tests.gpu.kernel_parts import Line
from tests.gpu.node_steps import NUM_RANKS, STEPS

MOST_OUTPUT = 20_000  # characters of a step that failed: the stacks of its ranks come last
ENV_SECONDS = 300


class Step(NamedTuple):
    name: str
    seconds: float  # at most
    command: Callable[[Path], list[str]]  # of its folder, where it writes figures to NAME.jsonl


class Done(NamedTuple):
    name: str
    verdict: str
    seconds: float
    lines: list[Line]
    output: str

    def told(self, where: str) -> str:
        figures = "; ".join(f"{'' if line.right else 'WRONG '}{line.name}: {line.value}" for line in self.lines)
        return f"step {where} {self.name}: {self.verdict}, {self.seconds:.0f} s: {figures or 'no figures'}"

    def section(self, where: str) -> Iterator[str]:
        yield from ("", f"## step {where} {self.name}: {self.verdict}, {self.seconds:.0f} s", "")
        yield from (f"- {'ok' if line.right else 'WRONG'}: {line.name}: {line.value}" for line in self.lines)
        if self.verdict != "ok":
            yield from ("", "```", self.output[-MOST_OUTPUT:], "```")


def run_step(step: Step, environment: dict[str, str]) -> Done:
    with tempfile.TemporaryDirectory() as directory:
        folder, started = Path(directory), time.monotonic()
        output = folder / "output"
        with output.open("w") as file:
            status = run_limited(step.command(folder), step.seconds, file, environment)
        figures = folder / f"{step.name}.jsonl"
        lines = [Line(*json.loads(text)) for text in figures.read_text().splitlines()] if figures.exists() else []
        right = status == 0 and bool(lines) and all(line.right for line in lines)
        verdict = "timed out" if status is None else "ok" if right else "failed"
        return Done(step.name, verdict, time.monotonic() - started, lines, output.read_text(errors="replace"))


def run_limited(command: list[str], seconds: float, out: object, environment: dict[str, str]) -> int | None:
    """The exit status; None of a process that was ended, with all that it had started."""
    process = psutil.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT)
    try:
        status: int = process.wait(seconds)
        return status
    except psutil.TimeoutExpired:
        return None
    finally:
        family = [*process.children(recursive=True), process] if process.is_running() else []
        for each in family:
            each.kill()
        psutil.wait_procs(family, timeout=30)


def run_steps(steps: Iterable[Step], out: Path, head: str, environment: dict[str, str]) -> bool:
    """Whether all are ok; a line for each on stdout, the whole in the report."""
    steps, report, right = list(steps), head, True
    for number, step in enumerate(steps, 1):
        done, where = run_step(step, environment), f"{number}/{len(steps)}"
        print(done.told(where), flush=True)
        report += "\n".join(done.section(where)) + "\n"
        out.write_text(report)
        right &= done.verdict == "ok"
    return right


def versions(environment: dict[str, str]) -> str:
    """The head of the report."""
    with tempfile.TemporaryFile("w+") as file:
        run_limited([sys.executable, "-m", "hybridflow.cli.env"], ENV_SECONDS, file, environment)
        file.seek(0)
        return f"# The first hour on a node\n\n```\n{file.read().strip()}\n```\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu node", description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("node_report.md"), help="the report")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs")
    given = parser.parse_args(arguments)
    if unknown := set(given.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if not given.tiny and torch.cuda.device_count() < NUM_RANKS:
        parser.error(f"{torch.cuda.device_count()} GPUs here, {NUM_RANKS} are needed; --tiny runs on CPUs")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment |= {"HYBRIDFLOW_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""} if given.tiny else {}
    steps = [_step(name, tiny=given.tiny) for name in STEPS if name in given.steps or not given.steps]
    return int(not run_steps(steps, given.out.absolute(), versions(environment), environment))


def _step(name: str, *, tiny: bool) -> Step:
    command = [sys.executable, "-m", "tests.gpu.node_steps", name]
    return Step(name, 60 * STEPS[name][1], lambda folder: [*command, str(folder), *["--tiny"] * tiny])
