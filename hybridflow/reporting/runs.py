"""What a run directory holds, read for a person: every metric, the config, the layout, some of the samples.

A run may be under way: a line that is being written is not looked at. `notes` report damage, and what
comes before the damage is shown.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.config import read_tree
from hybridflow.config.kinds import config_class
from hybridflow.errors import ConfigError, RunDirError
from hybridflow.parallel.peer_processes import is_running
from hybridflow.parallel.watchdog import REPORT
from hybridflow.recording.resume import KeptMetrics, kept_metrics
from hybridflow.recording.run_dir import RunLayout, read_layout
from hybridflow.recording.starts import RunStart, last_sign, read_starts
from hybridflow.recording.writers import EXPERTS_LOAD

Curve = list[tuple[int, float]]  # (iteration, value), wherever the metric has one
Sample = dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """By iteration, ascending; `of`: of how many iterations these are."""

    by_iteration: Mapping[int, Sequence[Sample]]
    of: int


@dataclass(frozen=True)
class RunRecord:
    label: str  # differs from that of every other run of the page
    path: Path
    iterations: tuple[int, ...]
    curves: Mapping[str, Curve]
    config: Mapping[str, str]  # by dotted key
    layout: RunLayout | None
    samples: Samples
    notes: tuple[str, ...]
    own_keys: frozenset[str] | None = None  # of the config, that differ from the defaults; None: not known
    starts: tuple[RunStart, ...] = ()
    last_sign: float = 0.0  # when the last start has written a row, in seconds since 1970
    is_running: bool | None = None  # None: not known here
    has_hang_report: bool = False  # of the last start
    read_at: float = 0.0  # seconds since 1970
    experts_load: Mapping[int, Curve] = field(default_factory=dict)  # by number of the layer; none of a dense model


def read_runs(paths: Sequence[Path], *, sampled_iterations: int) -> list[RunRecord]:
    """Errors: RunDirError and ConfigError, naming the directory or the file."""
    labels = _labels(paths)
    return [_read_run(path, label, sampled_iterations) for path, label in zip(paths, labels, strict=True)]


def _labels(paths: Sequence[Path]) -> list[str]:
    """Names of the directories; of those that are named alike as much of the path as tells them apart."""
    parts = [path.resolve().parts for path in paths]
    for i, names in enumerate(parts):
        if names in parts[:i]:
            raise RunDirError(f"{paths[i]}: is given twice")

    def label(names: tuple[str, ...]) -> str:
        ends = ("/".join(names[-length:]) for length in range(1, len(names) + 1))
        alone = (end for end in ends if sum("/".join(other).endswith(f"/{end}") for other in parts) == 1)
        return next(alone, str(Path(*names)))

    return [label(names) for names in parts]


def _read_run(path: Path, label: str, sampled_iterations: int) -> RunRecord:
    if not path.is_dir():
        what = "is no directory" if path.exists() else "no such directory"
        raise RunDirError(f"{path}: {what}; a run's is OUTPUT_DIR/NAME of its config, such as runs/quickstart")
    metrics, notes = _metrics(path / "metrics.csv")
    samples, more = read_samples(path / "samples.jsonl", sampled_iterations)
    load = kept_metrics(path / EXPERTS_LOAD, sys.maxsize)
    starts, config = tuple(read_starts(path)), read_tree(path / "config.yaml")
    return RunRecord(
        label=label,
        path=path,
        iterations=tuple(int(row[0]) for row in metrics.rows),
        curves=_curves(metrics),
        config=dict(_flat(config)),
        own_keys=own_keys(config),
        layout=read_layout(path),
        samples=samples,
        notes=(*notes, *more),
        starts=starts,
        last_sign=last_sign(path, starts[-1]) if starts else 0.0,
        is_running=is_running(*starts[-1].process) if starts else None,
        has_hang_report=bool(starts) and _is_newer(path / "logs" / REPORT, starts[-1].began),
        read_at=time.time(),
        experts_load={} if load is None else _by_layer(_curves(load)),
    )


def _is_newer(file: Path, seconds: float) -> bool:
    return file.exists() and file.stat().st_mtime >= seconds


# ------------------------------------------------------------------------------------------------ metrics


def _metrics(file: Path) -> tuple[KeptMetrics, list[str]]:
    kept = kept_metrics(file, sys.maxsize)
    if kept is None:
        raise RunDirError(f"{file}: no such file; a run writes it with metrics.csv: true, and its directory has it")
    if not kept.rows:
        raise RunDirError(f"{file}: no iteration is in it, so there is nothing to report")
    num_lines = file.read_bytes().count(b"\n") - 1
    if len(kept.rows) == num_lines:
        return kept, []
    return kept, [f"metrics.csv: line {len(kept.rows) + 2} is no row; it and the lines below it are left out"]


def _curves(metrics: KeptMetrics) -> dict[str, Curve]:
    curves: dict[str, Curve] = {name: [] for name in metrics.columns[1:]}
    for row in metrics.rows:
        iteration = int(row[0])
        for curve, cell in zip(curves.values(), row[1:], strict=True):
            if cell:
                curve.append((iteration, float(cell)))
    return curves


def _by_layer(curves: Mapping[str, Curve]) -> dict[int, Curve]:
    """Of the columns layer_N, ascending."""
    numbers = {int(name.removeprefix("layer_")): name for name in curves if re.fullmatch(r"layer_[0-9]+", name)}
    return {number: curves[name] for number, name in sorted(numbers.items())}


# ------------------------------------------------------------------------------------------------ samples


def read_samples(file: Path, num_iterations: int) -> tuple[Samples, list[str]]:
    """Those of so many iterations, evenly spaced from the first to the last; and what is wrong with the file."""
    if not file.exists():
        return Samples({}, 0), ["samples.jsonl is not there: no samples are shown"]
    notes: list[str] = []
    known = list(dict.fromkeys(sample["iteration"] for sample in _lines(file, notes)))
    wanted = set(spaced(known, num_iterations))
    found: dict[int, list[Sample]] = {}
    for sample in _lines(file, []):
        if sample["iteration"] in wanted:
            found.setdefault(sample["iteration"], []).append(sample)
    return Samples(dict(sorted(found.items())), len(known)), notes


def spaced(items: Sequence[int], count: int) -> list[int]:
    """`count` of them, evenly spaced from the first to the last; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _lines(file: Path, notes: list[str]) -> Iterator[Sample]:
    """The samples up to the first line that is none; that one is noted."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            sample = _sample(line)
            if sample is None:
                notes.append(f"samples.jsonl: line {number} is no sample; it and the lines below it are left out")
                return
            yield sample


def _sample(line: bytes) -> Sample | None:
    try:
        sample = json.loads(line)
    except ValueError:
        return None
    if not isinstance(sample, dict) or not {"iteration", "prompt", "response"} <= sample.keys():
        return None
    return sample if type(sample["iteration"]) is int else None


# ------------------------------------------------------------------------------------------------ config


def own_keys(tree: dict[str, Any]) -> frozenset[str] | None:
    """Dotted keys whose values differ from the defaults; None where the config is of another version of hybridflow."""
    try:
        config = config_class(tree).from_tree(tree, "config.yaml")
    except ConfigError:
        return None
    return frozenset(key for key, _ in _flat(config.model_dump(mode="json", exclude_defaults=True)))


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as JSON, in the order of the file."""
    children: Mapping[Any, Any] = tree if isinstance(tree, dict) else {}
    if isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        children = dict(enumerate(tree))
    if not children:
        yield prefix, json.dumps(tree, ensure_ascii=False, default=str)
    for key, value in children.items():
        yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
