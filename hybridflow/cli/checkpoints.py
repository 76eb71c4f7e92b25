"""List the checkpoints of a run, check that they are intact, and say how to resume from each.

    hybridflow checkpoints runs/math [--verify] [--metric NAME ...]

DIR is a run's directory, the checkpoints/ in there, or one checkpoint. Without --verify the command compares the size
of every file with the checkpoint's manifest. With --verify the command reads every byte. The exit status is 0 if all
checkpoints are intact, and 1 if one is damaged or there is none.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from hybridflow import __version__
from hybridflow.checkpoint.listing import (
    CheckpointFacts,
    CheckpointListing,
    ListedCheckpoint,
    find_checkpoints,
    look,
    size_of,
)
from hybridflow.checkpoint.store import CHECKPOINTS, CONFIG
from hybridflow.cli.command import argument_parser, as_typed, print_error
from hybridflow.errors import UserError
from hybridflow.formats.directories import Read

METRICS = ("reward/score_mean", "eval/accuracy", "kl/reference_mean")  # those that a run has
CONVERTED = ("actor", "reward_model")  # directories of models; a checkpoint has one of the two
WIDTH = 112  # columns of a pipe


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.checkpoints", __doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="a run, a checkpoints/, or one checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every byte")
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="show this metric; may be given several times"
    )
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    try:
        inventory = find_checkpoints(options.directory)
        entries = _looked_at(inventory.steps, thorough=options.verify)
    except UserError as error:
        print_error(error, "hybridflow.checkpoints")
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(_table(options.directory, inventory, entries, _columns(options.metric, entries), options.verify))
    for line in _notes(inventory, entries, options.metric or ()):
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)  # to be copied
    return int(any(entry.problems for entry in entries))


def _looked_at(steps: Sequence[Path], *, thorough: bool) -> list[ListedCheckpoint]:
    with _progress(sum(map(size_of, steps)), shown=thorough) as read:
        found = [look(step, thorough=thorough, read=read) for step in steps]
    return [entry for entry in found if entry is not None]


@contextmanager
def _progress(num_bytes: int, *, shown: bool) -> Iterator[Read]:
    """A bar that goes away at the end, on a terminal alone."""
    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=num_bytes)
        yield lambda count: bar.advance(task, count)


# ------------------------------------------------------------------------------------------------ the table


def _columns(chosen: Sequence[str] | None, entries: Sequence[ListedCheckpoint]) -> list[str]:
    return list(dict.fromkeys(chosen)) if chosen else [name for name in METRICS if _has(entries, name)]


def _has(entries: Sequence[ListedCheckpoint], metric: str) -> bool:
    return any(entry.facts is not None and metric in entry.facts.metrics for entry in entries)


def _table(
    directory: Path,
    inventory: CheckpointListing,
    entries: Sequence[ListedCheckpoint],
    metrics: Sequence[str],
    verified: bool,
) -> Table:
    table = Table(title=Text(f"Checkpoints of {directory}"), title_justify="left")
    for name in ("iteration", "size", "written", *metrics):
        table.add_column(Text(name.replace("/", "/\n")), justify="right", overflow="fold")  # narrow enough for a page
    table.add_column("state")
    for entry in entries:
        state = _state(entry, verified) + (", latest" if entry.step.resolve().name == inventory.latest else "")
        cells = ("-" if entry.iteration is None else str(entry.iteration), decimal(entry.num_bytes), _date(entry))
        style = "red" if entry.problems else None
        table.add_row(*cells, *(_metric(entry, name) for name in metrics), state, style=style)
    return table


def _state(entry: ListedCheckpoint, verified: bool) -> str:
    if entry.written is None:
        return "incomplete"
    return "damaged" if entry.problems else "verified" if verified else "complete"


def _date(entry: ListedCheckpoint) -> str:
    return "-" if entry.written is None else f"{datetime.fromtimestamp(entry.written):%Y-%m-%d %H:%M}"


def _metric(entry: ListedCheckpoint, name: str) -> str:
    known = entry.facts.metrics if entry.facts is not None else {}
    return f"{known[name]:.4g}" if name in known else "-"


# ------------------------------------------------------------------------------------------------ below it


def _notes(inventory: CheckpointListing, entries: Sequence[ListedCheckpoint], chosen: Sequence[str]) -> Iterator[str]:
    for entry in entries:
        yield from entry.problems
    for path in inventory.leftovers:
        yield f"{path}: {decimal(size_of(path))}, of a save that is under way or did not end; the next save removes it"
    if not inventory.is_one and inventory.latest not in [step.name for step in inventory.steps]:
        yield (
            f"latest names {inventory.latest or 'nothing'}, which is no checkpoint; a resume does not need the file "
            "latest"
        )
    yield from _forks(entries)
    for metric in chosen:
        if not _has(entries, metric):
            known = sorted({name for entry in entries if entry.facts for name in entry.facts.metrics})
            yield f"no checkpoint has the metric {metric}; there are: {', '.join(known) or 'none'}"
    intact = [entry for entry in entries if not entry.problems]
    if intact:
        yield ""
        yield from _commands(intact[-1], goes_on=not inventory.is_one)


def _forks(entries: Sequence[ListedCheckpoint]) -> Iterator[str]:
    """Where the run began: one line for all of one origin."""
    origins: dict[str, list[str]] = {}
    for entry in entries:
        if entry.facts is not None and entry.facts.forked_from is not None:
            origins.setdefault(entry.facts.forked_from, []).append(str(entry.iteration))
    for origin, iterations in origins.items():
        yield f"forked from {origin}: {', '.join(iterations)}"


def _commands(entry: ListedCheckpoint, *, goes_on: bool) -> Iterator[str]:
    """What to do with the newest intact checkpoint, which is the one that a run goes on from."""
    assert entry.facts is not None, f"{entry.step} is intact"
    train = f"{as_typed()} train {_quoted(entry.step / CONFIG)} --nproc N"
    if goes_on and entry.step.resolve().parent.name == CHECKPOINTS:
        keys = " ".join(map(_quoted, _keys(entry.step.resolve().parents[1], entry.facts)))
        yield f"resume from {entry.iteration} with the command that began the run, or: {f'{train} {keys}'.rstrip()}"
    yield f"fork {entry.iteration}: {train} {_quoted(f'checkpoint.load={entry.step}')} name=NEW"
    model = next(name for name in CONVERTED if (entry.step / name).is_dir())
    yield f"convert {entry.iteration}: {as_typed()} convert megatron-to-hf {_quoted(entry.step / model)} OUT"


def _keys(run_dir: Path, facts: CheckpointFacts) -> Iterator[str]:
    """What the saved config needs to mean this run: a directory may have been moved."""
    if (Path(facts.output_dir) / facts.name).resolve() != run_dir:
        yield from (f"output_dir={run_dir.parent}", f"name={run_dir.name}")
    if facts.load == "none":
        yield "checkpoint.load=auto"


def _quoted(word: str | Path) -> str:
    return shlex.quote(str(word))
