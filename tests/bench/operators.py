"""Where the seconds of iterations go, by phase and kind of work: what `tests.bench.iteration --profile` shows.

torch.profiler tells when each operator ran; every instant belongs to the innermost one. Ranges that the code itself
does not have are set from here, while iterations are profiled: phases, vLLM's sampler, and collectives, before each of
which all of its ranks meet, so that waiting for the slowest is told apart from the exchange.
"""

import contextlib
import ctypes
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from hybridflow.cpu import peer_memory
from hybridflow.cpu.engine import kernels as cpu_kernels
from hybridflow.cpu.kernels.decoder import KINDS as KINDS_OF_A_LAYER
from hybridflow.cpu.kernels.decoder import DecoderLayer
from hybridflow.cpu.megatron import weight_gradients
from hybridflow.parallel.collectives import COLLECTIVES
from hybridflow.recording.measure import Stopwatch

REST, ENGINE = "Python and small operations", "engine step"
KINDS = {  # by the beginning of an operator's name, the first that fits
    "products": (
        "kind:products",
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::matmul",
        "mkldnn::",
    ),
    "attention": (
        "aten::scaled_dot_product",
        "aten::_scaled_dot_product",
        "NativeAttention",
        "kind:attention",
        "_C::cpu_att",
        "_C_cache_ops::",
        "vllm::uni",
    ),
    "vocabulary": ("kind:vocabulary", "_VocabParallelLogProbs"),
    "optimizer": ("Optimizer.step",),
    "exchange": ("kind:exchange", "c10d::"),
    "waiting": ("kind:waiting",),
    "elementwise": (
        "kind:elementwise",
        "aten::",
        "_C::",
        "vllm::",
        "RMSNormFunction",
        "SwiGLUFunction",
        "Rotate",
        "TurnedHeads",
    ),
}
COLUMNS = (*list(KINDS), ENGINE, REST)
INNERMOST = {"elementwise", "optimizer", "vocabulary"}  # what these hold of other kinds is of those
WITHIN = {"vocabulary": {"elementwise"}, "optimizer": {"elementwise"}}  # but not of these
OF_THE_ENGINE = {  # its kernels in C that no operator of torch calls
    "linear": "kind:products",
    "rms_norm": "kind:elementwise",
    "add_rms_norm": "kind:elementwise",
    "swiglu": "kind:elementwise",
}
LAYER = "layer of the engine"  # one call, of kinds whose seconds it tells
PHASE = "phase:"
Event = tuple[str, float, float]  # name, start and end in microseconds
Cells = dict[tuple[str, str, str], float]  # seconds by phase, kind, and the operator that is of that kind


def profiled(work: Callable[[], Any]) -> tuple[Cells, dict[str, float]]:
    """Seconds of what this rank did within `work`, by innermost phase, and those phases by a clock. Collective."""
    clock, layers = Clock(), list[Sequence[float]]()
    with ranges(clock, layers), profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    events = [event for event in recorded.events() if not event.is_async]
    main = next(event.thread for event in events if event.name.startswith(PHASE))
    own = ((e.name, e.time_range.start, e.time_range.end) for e in events if e.thread == main)
    return charged(told_apart(own, layers)), dict(clock.seconds)


def told_apart(events: Iterable[Event], layers: Sequence[Sequence[float]]) -> Iterator[Event]:
    """The same events; each layer of the engine as its kinds, one after the other, of the seconds that it has told."""
    seconds = iter(layers)
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if name != LAYER:
            yield name, start, end
            continue
        for kind, part in zip(KINDS_OF_A_LAYER, next(seconds), strict=True):
            yield f"kind:{kind}", start, start + 1e6 * part
            start += 1e6 * part


class Clock:
    """Seconds by phase, without those of phases within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.within: list[float] = [0.0]  # of phases that are open: what has passed in phases within

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self.within.append(0.0)
        yield
        passed = time.perf_counter() - started
        self.seconds[name] += passed - self.within.pop()
        self.within[-1] += passed


def charged(events: Iterable[Event]) -> Cells:
    """Of nested events: each instant goes to its innermost event. Seconds, within phases."""
    cells: Cells = defaultdict(float)
    stack: list[tuple[float, str, str, str]] = [(float("inf"), "", "", "")]  # end, phase, kind, operator
    now = 0.0

    def until(moment: float) -> float:
        _, phase, kind, operator = stack[-1]
        if phase and moment > now:
            cells[phase, kind or (ENGINE if phase == "generate" else REST), operator] += (moment - now) / 1e6
        return max(moment, now)

    for name, start, end in sorted(events, key=lambda event: (event[1], -event[2])):
        while stack[-1][0] <= start:
            now = until(stack[-1][0])
            stack.pop()
        now = until(start)
        outer_end, phase, kind, operator = stack[-1]
        end = min(end, outer_end)
        if name.startswith(PHASE):
            stack.append((end, name.removeprefix(PHASE), "", ""))
        else:
            inner = inner_kind(kind, name)
            stack.append((end, phase, inner, operator if inner == kind else name))
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
def ranges(clock: Clock, layers: list[Sequence[float]]) -> Iterator[None]:
    """layers: what each layer of the engine tells is added."""
    from vllm.v1.sample.sampler import Sampler

    with contextlib.ExitStack() as stack:

        def replaced(owner: Any, name: str, new: Callable) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        replaced(Stopwatch, "phase", named_phase(Stopwatch.phase, clock))
        replaced(Sampler, "forward", in_range(Sampler.forward, "kind:vocabulary"))
        for name, kind in OF_THE_ENGINE.items():
            replaced(cpu_kernels, name, in_range(getattr(cpu_kernels, name), kind))
        replaced(DecoderLayer, "compute", telling(DecoderLayer.compute, layers))
        adds = weight_gradients.wgrad_gemm_accum_fp32
        replaced(weight_gradients, "wgrad_gemm_accum_fp32", in_range(adds, "kind:products"))
        for name in COLLECTIVES:
            replaced(dist.ProcessGroup, name, met(getattr(dist.ProcessGroup, name), dist.ProcessGroup.barrier))
        replaced(peer_memory, "read", in_range(peer_memory.read, "kind:exchange"))
        replaced(dist.Work, "wait", in_range(dist.Work.wait, "kind:exchange"))
        yield


def named_phase(phase: Callable, clock: Clock) -> Callable:
    @contextlib.contextmanager
    def named(watch: Stopwatch, name: str) -> Iterator[None]:
        with clock.phase(name), phase(watch, name), record_function(PHASE + name):
            yield

    return named


def in_range(function: Callable, name: str) -> Callable:
    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return within


def telling(compute: Callable, layers: list[Sequence[float]]) -> Callable:
    @functools.wraps(compute)
    def told(layer: DecoderLayer, *args: Any) -> None:
        layers.append((ctypes.c_double * len(KINDS_OF_A_LAYER))())
        with record_function(LAYER):
            compute(layer, layers[-1])

    return told


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


STAGES = {"rollout": "rest of rollout", "estimate": "rest of estimate", "update": "rest of update"}


def print_profile(cells: Cells, measured: dict[str, float], *, plain: float, title: str) -> None:
    """By phase, with the sum of its row and the seconds that a clock has measured; then the largest operators.

    Errors: AssertionError where the parts are not the whole, within 5 %.
    """
    table = Table(title=title)
    for column in ("phase", *COLUMNS, "sum", "measured"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    totals = [0.0] * (len(COLUMNS) + 2)
    for phase, seconds in measured.items():
        kinds = [sum(x for (of, kind, _), x in cells.items() if (of, kind) == (phase, column)) for column in COLUMNS]
        numbers = [*kinds, sum(kinds), seconds]
        table.add_row(STAGES.get(phase, phase), *(f"{x:.3f}" for x in numbers))
        totals = [total + x for total, x in zip(totals, numbers, strict=True)]
    *_, parts, whole = totals
    table.add_section()
    table.add_row("iteration", *(f"{x:.3f}" for x in totals))
    table.add_row("share", *(f"{x / whole:.1%}" for x in totals))
    console = Console(width=170, highlight=False)
    console.print(table)
    largest = sorted(cells.items(), key=lambda cell: -cell[1])[:12]
    console.print("largest:", ", ".join(f"{shown(kind, name)} in {of} {x:.3f}" for (of, kind, name), x in largest))
    console.print(
        f"under the profiler an iteration takes {whole:.3f} s, without it {plain:.3f} s, by turns in this run: "
        f"{whole / plain - 1:+.0%}, most of it where operators are small"
    )
    assert abs(parts / whole - 1) <= 0.05, f"the parts are {parts:.3f} s of {whole:.3f} s measured"


def shown(kind: str, operator: str) -> str:
    return kind if not operator or operator.startswith("kind:") else operator
