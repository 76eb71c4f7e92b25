"""Where the seconds of iterations go, by phase and kind of work: what `tests.bench.iteration --profile` shows.

torch.profiler tells when each operator ran; every instant belongs to the innermost one. Ranges that the code itself does
not have are set from here, while iterations are profiled: phases, vLLM's sampler, and collectives, before each of which
all of its ranks meet, so that waiting for the slowest is told apart from the exchange.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from hybridflow.parallel.collectives import COLLECTIVES
from hybridflow.recording.measure import Stopwatch

REST, ENGINE = "Python and small operations", "engine step"
KINDS = {  # by the beginning of an operator's name, the first that fits
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul", "mkldnn::"),
    "attention": (
        "aten::scaled_dot_product",
        "aten::_scaled_dot_product",
        "_C::cpu_att",
        "_C_cache_ops::",
        "vllm::uni",
    ),
    "vocabulary": ("kind:vocabulary", "_VocabParallelLogProbs"),
    "optimizer": ("Optimizer.step",),
    "exchange": ("kind:exchange", "c10d::"),
    "waiting": ("kind:waiting",),
    "elementwise": ("aten::", "_C::", "vllm::"),
}
COLUMNS = (*list(KINDS), ENGINE, REST)
INNERMOST = {"elementwise", "optimizer", "vocabulary"}  # what these hold of other kinds is of those
WITHIN = {"vocabulary": {"elementwise"}, "optimizer": {"elementwise"}}  # but not of these
PHASE = "phase:"
Cells = dict[tuple[str, str], float]  # seconds by phase and kind


def profiled(work: Callable[[], Any]) -> Cells:
    """Seconds of what this rank did within `work`, by innermost phase and kind. Collective."""
    with ranges(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    events = [event for event in recorded.events() if not event.is_async]
    main = next(event.thread for event in events if event.name.startswith(PHASE))
    return charged((e.name, e.time_range.start, e.time_range.end) for e in events if e.thread == main)


def charged(events: Iterable[tuple[str, float, float]]) -> Cells:
    """(name, start, end) in microseconds, nested: each instant goes to its innermost event. Seconds, within phases."""
    cells: Cells = defaultdict(float)
    stack: list[tuple[float, str, str]] = [(float("inf"), "", "")]  # end, phase, kind
    now = 0.0

    def until(moment: float) -> float:
        _, phase, kind = stack[-1]
        if phase and moment > now:
            cells[phase, kind or (ENGINE if phase == "generate" else REST)] += (moment - now) / 1e6
        return max(moment, now)

    for name, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
        while stack[-1][0] <= start:
            now = until(stack[-1][0])
            stack.pop()
        now = until(start)
        outer_end, phase, kind = stack[-1]
        if name.startswith(PHASE):
            stack.append((min(end, outer_end), name.removeprefix(PHASE), ""))
        else:
            stack.append((min(end, outer_end), phase, inner_kind(kind, name)))
    while len(stack) > 1:
        now = until(stack[-1][0])
        stack.pop()
    return dict(cells)


def inner_kind(outer: str, name: str) -> str:
    """The kind of an operator that runs within one of the kind `outer`."""
    if outer and outer not in INNERMOST:
        return outer
    found = kind_of(name)
    return outer if not found or found in WITHIN.get(outer, ()) else found


@functools.cache
def kind_of(name: str) -> str:
    return next((kind for kind, beginnings in KINDS.items() if name.startswith(beginnings)), "")


# ------------------------------------------------------------------------------------------------ ranges


@contextlib.contextmanager
def ranges() -> Iterator[None]:
    from vllm.v1.sample.sampler import Sampler

    with contextlib.ExitStack() as stack:

        def replaced(owner: Any, name: str, new: Callable) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        replaced(Stopwatch, "phase", named_phase(Stopwatch.phase))
        replaced(Sampler, "forward", in_range(Sampler.forward, "kind:vocabulary"))
        for name in COLLECTIVES:
            replaced(dist.ProcessGroup, name, met(getattr(dist.ProcessGroup, name), dist.ProcessGroup.barrier))
        replaced(dist.Work, "wait", in_range(dist.Work.wait, "kind:exchange"))
        yield


def named_phase(phase: Callable) -> Callable:
    @contextlib.contextmanager
    def named(watch: Stopwatch, name: str) -> Iterator[None]:
        with phase(watch, name), record_function(PHASE + name):
            yield

    return named


def in_range(function: Callable, name: str) -> Callable:
    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return within


def met(collective: Callable, barrier: Callable) -> Callable:
    """Have all ranks of the group meet, then do it; what is started is waited for where the program does."""

    @functools.wraps(collective)
    def meet_first(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1:
            with record_function("kind:waiting"):
                work = barrier(group)
                if work is not None:
                    work.wait()
        with record_function("kind:exchange"):
            return collective(group, *args, **kwargs)

    return meet_first


# ------------------------------------------------------------------------------------------------ the table


def print_profile(cells: Cells, measured: dict[str, float], *, plain: float, title: str) -> None:
    """Of one rank or the mean of all: by phase, with its sum and the seconds that the run itself has measured."""
    within = {"rollout": ("generate",), "update": ("critic_update", "actor_update")}
    within["estimate"] = ("reward", "log_probs", "reference", "values")
    own = {stage: measured[stage] - sum(measured.get(name, 0.0) for name in names) for stage, names in within.items()}
    table = Table(title=title)
    for column in ("phase", *COLUMNS, "sum", "measured"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    totals: dict[str, float] = defaultdict(float)
    for stage, names in within.items():
        for name in (*(name for name in names if name in measured), stage):
            row = [cells.get((name, column), 0.0) for column in COLUMNS]
            numbers = [*row, sum(row), own.get(name, measured[name])]
            table.add_row(f"rest of {stage}" if name == stage else name, *(f"{x:.3f}" for x in numbers))
            for column, x in zip((*COLUMNS, "sum", "measured"), numbers, strict=True):
                totals[column] += x
    table.add_section()
    table.add_row("iteration", *(f"{x:.3f}" for x in totals.values()))
    table.add_row("share", *(f"{x / totals['measured']:.1%}" for x in totals.values()))
    console = Console(width=170, highlight=False)
    console.print(table)
    console.print(
        f"under the profiler an iteration takes {totals['measured']:.3f} s, without it {plain:.3f} s, by turns in this "
        f"run: {totals['measured'] / plain - 1:+.0%}, most of it where operations are small"
    )
    apart = abs(totals["sum"] / totals["measured"] - 1)
    assert apart <= 0.05, f"the parts are {totals['sum']:.3f} s of {totals['measured']:.3f} s measured"
