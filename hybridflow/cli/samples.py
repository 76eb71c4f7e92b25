"""Print prompts, responses and scores of one iteration: the best, the worst, and some others.

    hybridflow samples runs/math [--iteration N] [--number K] [--seed S]

RUN is a run's directory or the samples.jsonl in there. The file holds metrics.num_samples responses of each iteration.
Without --iteration the command shows the last iteration. --seed chooses the others. What an environment has written
stands within marks. The exit status is 1 if there is nothing to show.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, print_error
from hybridflow.data.rows import shown
from hybridflow.errors import DataError, UserError
from hybridflow.recording.marked_turns import Turn, marked

WIDTH = 112  # columns of a pipe
CUT = " [cut here by a limit]"
MOST_SHOWN = 200  # characters of a column
STYLES = {"best": "green", "worst": "red", "random": "blue", "held-out": "cyan"}


@dataclass(frozen=True)
class ShownSample:
    """A line of samples.jsonl."""

    iteration: int
    prompt: str
    response: str
    score: float | None
    parts: Mapping[str, float]
    columns: Mapping[str, Any] = field(default_factory=dict)
    heldout: bool = False
    set: str = ""
    turns: Sequence[Turn] = ()
    truncated: bool = False


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.samples", __doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, or a samples.jsonl")
    parser.add_argument("--iteration", type=int, metavar="N", help="the iteration to show (default: the last)")
    parser.add_argument(
        "--number", type=int, default=2, metavar="K", help="responses of each kind, at most (default 2)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed that chooses the others (default 0)")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    if options.number < 1:
        parser.error(f"--number {options.number}: at least 1")
    try:
        samples = of_iteration(read_samples(options.run), options.iteration, options.run)
    except UserError as error:
        print_error(error, "hybridflow.samples")
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    trained = [sample for sample in samples if not sample.heldout]
    heldout = [sample for sample in samples if sample.heldout]
    console.print(Text(f"{options.run}: iteration {samples[0].iteration}{_count(trained, heldout)}"), soft_wrap=True)
    for kind, sample in choose_samples(trained, options.number, options.seed):
        console.print(_panel(f"{kind} of {len(trained)}", STYLES[kind], sample))
    for sample in heldout[: options.number]:
        console.print(_panel(f"held-out, {sample.set or 'greedy'}", STYLES["held-out"], sample))
    return 0


def _count(trained: Sequence[ShownSample], heldout: Sequence[ShownSample]) -> str:
    """How many responses were written, and the mean of their scores."""
    scores = [sample.score for sample in trained if sample.score is not None]
    mean = f", mean score of these {len(scores)}: {sum(scores) / len(scores):.4g}" if scores else ""
    more = f"; {len(heldout)} to held-out prompts" if heldout else ""
    return f", {len(trained)} responses written{mean}{more}"


def read_samples(run: Path) -> list[ShownSample]:
    """In the order of the file; a last line that is being written is left out. Errors: DataError."""
    file = run / "samples.jsonl" if run.is_dir() else run
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    return [_sample(line, f"{file}: line {number}") for number, line in enumerate(lines, start=1)]


def of_iteration(samples: Sequence[ShownSample], iteration: int | None, run: Path) -> list[ShownSample]:
    """Those of this iteration, or of the last. Errors: DataError where there are none."""
    there = sorted({sample.iteration for sample in samples})
    if not there:
        raise DataError(f"{run}: holds no samples; metrics.num_samples says how many responses are written")
    wanted = there[-1] if iteration is None else iteration
    if wanted not in there:
        raise DataError(f"{run}: --iteration {wanted}: has none; there are iterations {there[0]} to {there[-1]}")
    return [sample for sample in samples if sample.iteration == wanted]


def choose_samples(samples: Sequence[ShownSample], number: int, seed: int) -> list[tuple[str, ShownSample]]:
    """At most `number` samples of each kind: best, worst, other. A sample appears once. Without scores all are other.

    Of equal scores the first of the file comes first. No more than a quarter, or one, is called best, or worst.
    """
    scored = [(-sample.score, place) for place, sample in enumerate(samples) if sample.score is not None]
    order = [place for _, place in sorted(scored)]
    most = min(number, max(1, len(samples) // 4))
    best = order[:most]
    worst = [place for _, place in sorted((-score, place) for score, place in scored) if place not in best][:most]
    others = [place for place in range(len(samples)) if place not in best and place not in worst]
    drawn = sorted(random.Random(seed).sample(others, min(number, len(others))))
    kinds = {"best": best, "worst": worst, "random": drawn}
    return [(kind, samples[place]) for kind, places in kinds.items() for place in places]


def _sample(line: bytes, where: str) -> ShownSample:
    try:
        tree: Any = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON: {error}") from error
    keys = {"iteration", "prompt", "response", "score"}
    if not isinstance(tree, dict) or not keys <= tree.keys():
        raise DataError(f"{where}: is no sample of a run: expected an object with {', '.join(sorted(keys))}")
    parts = tree["parts"] if "parts" in tree else {}  # earlier versions wrote none
    columns = tree["columns"] if isinstance(tree.get("columns"), dict) else {}
    heldout = tree.get("kind") == "heldout"
    turns = tree.get("turns") or ()
    return ShownSample(
        tree["iteration"],
        str(tree["prompt"]),
        str(tree["response"]),
        tree["score"],
        parts,
        columns=columns,
        heldout=heldout,
        set=str(tree.get("set", "")),
        turns=turns,
        truncated=tree.get("truncated") is True,
    )


def _panel(kind: str, style: str, sample: ShownSample) -> Panel:
    text = Text()
    text.append(_readable(sample.prompt), style="dim")
    text.append("\n")
    for turn in sample.turns or [Turn(by="model", text=sample.response)]:
        text.append(_readable(marked([turn])), style="bold" if turn["by"] == "model" else "italic")
    if sample.truncated:
        text.append(CUT, style="italic")
    for name, value in sample.columns.items():
        text.append(f"\n{name}: {_readable(shown(value, MOST_SHOWN))}", style="dim")
    parts = ", ".join(f"{name} {value:.4g}" for name, value in sample.parts.items())
    score = "no score" if sample.score is None else f"score {sample.score:.4g}"
    return Panel(
        text,
        title=Text(f"{kind}: {score}"),
        subtitle=Text(parts) if parts else None,
        title_align="left",
        subtitle_align="left",
        border_style=style,
    )


def _readable(text: str) -> str:
    """What a terminal would take for a command is shown as an escape."""
    shown = (c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)
