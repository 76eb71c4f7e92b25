"""Check the machines of a run before its start: packages, GPUs, memory, links, clocks, disks, and the config's inputs.

    torchrun --nproc-per-node 8 -m hybridflow.health [CONFIG] [section.key=value ...] [--json FILE]

Start the check as `hybridflow.train`: on all hosts, with as many ranks. One process without torchrun checks this
host. With CONFIG each host also checks that it can read the models, prompts and functions of CONFIG. Rank 0 then checks
that the run fits the ranks and their memory. The check builds no model and reads no weights. The exit status is 1 if a
line fails. A warning is no failure. Each line that is not ok names a remedy. docs/guides/cluster/health.md explains all
lines.
"""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridflow import __version__
from hybridflow.cli.command import argument_parser, print_error
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import EnvironmentProblem, UserError
from hybridflow.parallel.process_exit import leave, still_busy

if TYPE_CHECKING:
    from hybridflow.inspection.findings import HealthReport

WIDTH = 112  # columns of a pipe
STORE_TIMEOUT = timedelta(seconds=60)
END_SECONDS = 20.0  # that rank 0 waits until all others know what came of it
LOST = "the health check has lost the store of the run, or rank 0"


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.health", __doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="the experiment's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the config")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; with - to stdout, without the table")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_intermixed_args(arguments)
    try:
        status = _check(options.config, options.overrides, lambda report: _show(report, options.json)).exit_code
    except UserError as error:
        print_error(error, "hybridflow.health")
        status = 1
    if still_busy() and arguments is None:  # a command, with a disk or a connection that does not answer
        leave(status)
    return status


def run(config: str | Path | AnyConfig | None = None, overrides: Sequence[str] = ()) -> "HealthReport":
    """The same check from Python: collective over the ranks that torchrun has started, and alike on all of them.

    Needs no process group and leaves none behind. Errors: EnvironmentProblem where the ranks cannot meet at all. What
    is wrong with config, machines and links is in the report.
    """
    return _check(config, overrides, lambda report: None)


def _check(
    config: str | Path | AnyConfig | None, overrides: Sequence[str], show: Callable[["HealthReport"], None]
) -> "HealthReport":
    """show: called on rank 0, before any other rank goes on: torchrun ends all ranks when the first one fails."""
    # torch loads for seconds: a wrong option fails before
    from hybridflow.inspection.examination import Examination
    from hybridflow.inspection.findings import HealthReport
    from hybridflow.inspection.participant import Participant
    from hybridflow.parallel.rank0_commands import CommandLeader, follow
    from hybridflow.parallel.torchrun import meeting_store, started

    place = started()
    store = meeting_store(STORE_TIMEOUT)
    participant = Participant(store, place, config, tuple(overrides))
    try:
        if place.rank:
            return HealthReport.from_dict(follow(store, place.rank, participant.perform))
        leader = CommandLeader(store, place.world_size, participant.perform)
        report = Examination(leader, place).report(participant.config)
        try:
            show(report)
        finally:
            leader.end(report.as_dict(), END_SECONDS)
        return report
    except RuntimeError as error:  # of the store, whose host has left
        raise EnvironmentProblem(f"rank {place.rank}: {LOST}: {error}") from error


def _show(report: "HealthReport", file: str | None) -> None:
    from hybridflow.inspection.table import print_report

    text = json.dumps(report.as_dict(), indent=2)
    if file == "-":
        print(text, flush=True)
        return
    print_report(report, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    sys.stdout.flush()
    if file is not None:
        try:
            Path(file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"--json {file}: cannot be written: {error.strerror}") from error
