"""What a person sees of a run: a live bar on a terminal, elsewhere a line an iteration; on rank 0 alone.

The line of an iteration with an evaluation also appears above the bar, and stays there.

    with ProgressDisplay(config.num_iterations) as progress:
        progress.phase("iteration 1: generating")
        progress.iteration(1, metrics)

A metric may be a tensor; it is read when it is shown.
"""

import logging
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from hybridflow.parallel.rank_log import IN_FILES_ALONE

LOG = logging.getLogger(__name__)
Metrics = Mapping[str, float | Tensor]

# metric -> how it is shown; order of a line
SHOWN = {
    "reward/score_mean": "score {:.3g}",
    "eval/accuracy": "accuracy {:.3g}",
    "kl/reference_mean": "kl {:.3g}",
    "actor/loss": "actor/loss {:.3g}",
    "reward_model/loss": "reward_model/loss {:.3g}",
    "eval/loss": "held-out loss {:.4g}",
    "eval/reward_accuracy": "pairs right {:.3g}",
    "train/tokens_per_sec": "{:.0f} tok/s",
    "speed/iteration_mfu": "mfu {:.1%}",
    "time/iteration_seconds": "{:.1f} s",
}
WAITED_SHARE, WAITED_SECONDS = 0.1, 1.0  # of an iteration that others waited for one rank, from where a line names it
EVALUATED = "eval/"  # how the metrics of an evaluation begin
OF_SET = re.compile(r"eval/([^/]+)/accuracy")  # of a held-out set by name
SHOWN_IN_BAR = ("reward/score_mean", "eval/accuracy", "train/tokens_per_sec")  # 80 columns hold no more


class ProgressDisplay:
    """The display of rank 0: a bar where the console is a terminal, else a line an iteration. completed: by an earlier
    start of the run, or the run that this one is a fork of."""

    def __init__(self, num_iterations: int, *, completed: int = 0, console: Console | None = None) -> None:
        self._console, self._num_iterations = console or Console(), num_iterations
        self._display: _Bar | _Lines = (
            _Bar(num_iterations, completed, self._console)
            if self._console.is_interactive
            else _Lines(num_iterations, self._console)
        )

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()

    def phase(self, text: str) -> None:
        """Say what is going on now; shown on a terminal only."""
        LOG.info("%s", text)
        self._display.phase(text)

    def iteration(self, iteration: int, metrics: Metrics) -> None:
        """Iteration `iteration` is done (0: evaluation before training). Absent metrics are not shown."""
        LOG.info("%s", iteration_line(iteration, self._num_iterations, metrics), extra=IN_FILES_ALONE)
        self._display.iteration(iteration, metrics)

    def message(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        level = logging.WARNING if text.startswith("warning:") else logging.INFO
        LOG.log(level, "%s", text, extra=IN_FILES_ALONE)
        _print_line(self._console, text)


def iteration_line(iteration: int, num_iterations: int, metrics: Metrics) -> str:
    """`iteration 12/60  score 0.812  kl 0.0123  actor/loss -0.01  412 tok/s  1.9 s`, and what slowed the iteration."""
    shown = [*_shown(metrics, tuple(SHOWN)), *_of_sets(metrics), *_slowed(metrics)]
    return "  ".join([f"iteration {iteration}/{num_iterations}", *shown])


def summary_table(rows: list[tuple[str, str]]) -> Table:
    """Two columns, names and values, as they stand: brackets are no markup."""
    table = Table(show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def print_summary(title: str, rows: list[tuple[str, str]], *, console: Console | None = None) -> None:
    """Print a table under a title, as at the end of a run."""
    table = summary_table(rows)
    table.title = Text(title)
    (console or Console()).print(table)


class _Bar:
    """A bar with the last known metrics, and under it the phase. Redrawn in place; above it a line an evaluation."""

    def __init__(self, num_iterations: int, completed: int, console: Console) -> None:
        self._bar = RichProgress(
            TextColumn("iteration"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the others leave
            TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
            expand=True,
            # rich forgets samples older than this, and with them how long an iteration takes
            speed_estimate_period=7 * 24 * 3600,
        )
        self._task = self._bar.add_task("", total=num_iterations, completed=completed, shown="")
        self._phase = Spinner("dots", Text("starting"))
        self._live = Live(Group(self._bar, self._phase), console=console, refresh_per_second=4)
        self._num_iterations, self._console = num_iterations, console
        self._known: dict[str, float | Tensor] = {}

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.update(self._bar)  # the phase is over
        self._live.stop()

    def phase(self, text: str) -> None:
        self._phase.update(text=Text(text))

    def iteration(self, iteration: int, metrics: Metrics) -> None:
        self._known.update({name: metrics[name] for name in SHOWN_IN_BAR if name in metrics})
        self._bar.update(self._task, completed=iteration, shown="  ".join(_shown(self._known, SHOWN_IN_BAR)))
        if any(name.startswith(EVALUATED) for name in metrics):
            _print_line(self._console, iteration_line(iteration, self._num_iterations, metrics))


class _Lines:
    """One line an iteration, for files and pipes."""

    def __init__(self, num_iterations: int, console: Console) -> None:
        self._num_iterations = num_iterations
        self._console = console

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def phase(self, text: str) -> None:
        pass

    def iteration(self, iteration: int, metrics: Metrics) -> None:
        _print_line(self._console, iteration_line(iteration, self._num_iterations, metrics))


def _shown(metrics: Metrics, names: tuple[str, ...]) -> list[str]:
    return [SHOWN[name].format(float(metrics[name])) for name in names if name in metrics]


def _slowed(metrics: Metrics) -> list[str]:
    """A rank that the others waited for, and requests that the engine preempted."""
    waited, total = (float(metrics.get(f"time/{name}", 0.0)) for name in ("slowest_rank_seconds", "iteration_seconds"))
    found = []
    if waited >= WAITED_SECONDS and waited > WAITED_SHARE * total:
        found.append(f"waited {waited:.1f} s for rank {float(metrics['time/slowest_rank']):.0f}")
    if preempted := float(metrics.get("rollout/preemptions", 0.0)):
        found.append(f"{preempted:.0f} preemptions")
    return found


def _of_sets(metrics: Metrics) -> list[str]:
    """The accuracy on each held-out set by name."""
    found = [(OF_SET.fullmatch(name), value) for name, value in metrics.items()]
    return [f"{match[1]} {float(value):.3g}" for match, value in found if match]


def _print_line(console: Console, text: str) -> None:
    """As it stands: no markup, no colours, no line breaks at the width of a terminal that is not there."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
