"""Traces of torch's profiler in Chrome's format: a file for each stage of the iterations that `metrics.profile` names.

    trace = stage_traces(config.metrics.profile, run_dir, rank)
    with trace(iteration, "update"):      # runs/NAME/traces/iteration_000003_update_rank_0.json
        ...

The ranges of a trace are phases and micro-batches: `parallel.device.named_range`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from torch.profiler import profile, supported_activities

from hybridflow.config.metrics import ProfileConfig
from hybridflow.recording.run_dir import writing

Trace = Callable[[int, str], AbstractContextManager[None]]  # of (iteration, stage)


def untraced(iteration: int, stage: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def stage_traces(config: ProfileConfig | None, run_dir: Path, rank: int) -> Trace:
    """What this rank does at each stage of an iteration."""
    if config is None or rank not in config.ranks:
        return untraced
    return partial(_stage, config, run_dir / "traces", rank)


def _stage(
    config: ProfileConfig, directory: Path, rank: int, iteration: int, stage: str
) -> AbstractContextManager[None]:
    if iteration not in config.iterations:
        return untraced(iteration, stage)
    return _traced(directory / f"iteration_{iteration:06d}_{stage}_rank_{rank}.json", python=config.python)


@contextlib.contextmanager
def _traced(file: Path, *, python: bool) -> Iterator[None]:
    """Errors: RecordError where the file cannot be written."""
    with profile(activities=supported_activities(), with_stack=python) as profiler:
        yield
    partial_file = file.with_suffix(".partial")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(partial_file))
        os.replace(partial_file, file)
