"""The tables of `hybridflow.plan --time`, and the file that `hybridflow.plan --profile-device` measures and writes."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.placement.forecast import Report

NOTES = (
    "Seconds of the slowest rank. Roles on ranks of their own work at the same time: do not add up their seconds. "
    "Seconds of reward functions are unknown and left out.",
)
IDLE = "Idle: waiting for other ranks, also in the bubbles of a pipeline, of a role or of the engine."


def print_time(report: "Report", console: Console) -> None:
    of_phases = (*NOTES, *_side_by_side(report["side_by_side"]))
    for table, notes in ((_phases(report), of_phases), (_idle(report), (IDLE, *_largest(report)))):
        console.print()
        console.print(table)
        for note in notes:
            console.print(Text(note))


def _phases(report: "Report") -> Table:
    where = "measured" if report["measured"] else "not measured here"
    table = Table(title=f"Time of an iteration on {report['profile']} ({where})", title_justify="left")
    for column in ("phase", "role", "ranks", "seconds", "share", "bound by"):
        table.add_column(column, justify="right" if column in ("seconds", "share") else "left", overflow="fold")
    for row in report["phases"]:
        cells = (row["phase"], row["role"], row["ranks"], _seconds(row["seconds"]), f"{row['share']:.1%}")
        table.add_row(*cells, row["bound"])
    table.add_section()
    lengths = f"{report['prompt_tokens']:g} + {report['response_tokens']['mean']:g} tokens a row"
    rate = f"{report['tokens_per_second_per_device']:,.0f} tokens/s per device"
    table.add_row("iteration", "", lengths, _seconds(report["seconds"]), "", rate, style="bold")
    return table


def _side_by_side(found: "Report | None") -> list[str]:
    if found is None:
        return []
    names = {"engine": "the engine", "models": "the models"}
    longer, shorter = sorted(names, key=lambda name: -found[name])
    return [
        f"Side by side: the engine generates for {_seconds(found['engine'])} s, the models score and train for "
        f"{_seconds(found['models'])} s. An iteration takes the longer of both, and {_seconds(found['together'])} s of "
        "all ranks together.",
        f"In each iteration {names[shorter]} would wait {_seconds(found[longer] - found[shorter])} s for "
        f"{names[longer]}.",
    ]


def _idle(report: "Report") -> Table:
    table = Table(title="Idle share", title_justify="left")
    table.add_column("ranks")
    table.add_column("share", justify="right")
    for row in report["idle"]:
        table.add_row(row["ranks"], f"{row['share']:.1%}")
    return table


def _largest(report: "Report") -> list[str]:
    found = report["largest_batch"]
    room = f"{found['room'] / (1 << 30):.1f} GiB"
    if found["rows"] is None:
        return [f"No batch fits in {room} a device. The table of memory shows the parts."]
    if not found["is_bound"]:
        return [f"Any batch fits in {room} a device: more rows make more micro-batches, which need no more memory."]
    return [
        f"The largest batch that fits in {room} a device, with as many mini-batches: {found['key']} = {found['rows']}."
    ]


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def measure(output: str) -> None:
    """Measure this machine with all ranks that were started, and write the profile; the first rank tells how far it is.

    Errors: ConfigError where the file cannot be written, before anything is measured.
    """
    path, began = Path(output), time.monotonic()
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: {path.absolute().parent} is no directory")
    from hybridflow.automap.profiling.measure import measure_profile
    from hybridflow.parallel import platform as platforms
    from hybridflow.parallel import torchrun

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    profile = measure_profile(path.stem, tell=tell)
    if torchrun.torchrun_rank()[0] == 0:
        path.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    platforms.stop()
