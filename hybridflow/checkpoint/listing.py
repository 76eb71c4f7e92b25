"""What lies in a run's checkpoints/, for a person who looks: nothing is loaded, and torch is not imported.

    inventory = find_checkpoints(Path("runs/math"))     or runs/math/checkpoints, or a checkpoint
    entries = [look(step) for step in inventory.steps]

A checkpoint that a running training removes meanwhile is none (`look` gives None).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.store import (
    CHECKPOINTS,
    LATEST,
    LEFTOVER,
    MANIFEST,
    STATE,
    STEP,
    damage,
    read_manifest,
    read_state,
    step_name,
    steps,
)
from hybridflow.errors import CheckpointError
from hybridflow.formats.directories import Read


@dataclass(frozen=True)
class CheckpointListing:
    """Where checkpoints lie. By path, none of them read."""

    steps: tuple[Path, ...]  # ascending; intact or not
    latest: str | None  # what the file says
    leftovers: tuple[Path, ...]  # of saves that did not end, or are under way
    is_one: bool  # the path was that of one checkpoint


@dataclass(frozen=True)
class CheckpointFacts:
    """What state.json says that a person may want to know."""

    iteration: int
    metrics: Mapping[str, float]
    forked_from: str | None
    output_dir: str
    name: str
    load: str  # the key checkpoint.load


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint as it was found."""

    step: Path
    num_bytes: int  # on the disk
    written: float | None  # seconds since 1970; None without a manifest, which is written last
    facts: CheckpointFacts | None  # None where state.json cannot be read
    problems: tuple[str, ...]  # a line a file, which it names

    @property
    def iteration(self) -> int | None:
        """By the directory's name, or by state.json where the directory has another name."""
        match = STEP.fullmatch(self.step.name)
        return int(match[1]) if match else self.facts.iteration if self.facts else None


def find_checkpoints(path: Path) -> CheckpointListing:
    """path: a run directory, a checkpoints/ directory, or a checkpoint. Errors: CheckpointError without checkpoints."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    if (path / MANIFEST).exists() or STEP.fullmatch(path.resolve().name):
        return CheckpointListing((path,), _latest(path.resolve().parent), (), is_one=True)
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    leftovers = tuple(sorted(child for child in root.iterdir() if LEFTOVER.fullmatch(child.name)))
    found = tuple(root / step_name(iteration) for iteration in steps(root))
    if not found:
        left = "".join(f"\n{child}: is left of a save that did not end" for child in leftovers)
        raise CheckpointError(f"{root}: holds no checkpoint{left}")
    return CheckpointListing(found, _latest(root), leftovers, is_one=False)


def look(step: Path, *, thorough: bool = False, read: Read = lambda num_bytes: None) -> ListedCheckpoint | None:
    """What a checkpoint holds, and the damage. thorough: read every byte; `read` gets each block's number of bytes.

    None where the checkpoint is gone by the end.
    """
    try:
        problems = damage(step, read_manifest(step).files, thorough=thorough, read=read)
    except CheckpointError as error:
        problems = [str(error)]
    facts = None
    try:
        facts = _facts(step)
    except CheckpointError as error:
        if not any(line.startswith(f"{step / STATE}: ") for line in problems):
            problems.append(str(error))
    entry = ListedCheckpoint(step, size_of(step), _when(step / MANIFEST), facts, tuple(problems))
    return entry if step.is_dir() else None


def size_of(directory: Path) -> int:
    """Bytes of the files in it that are still there."""
    return sum(_size(path) for path in directory.rglob("*"))


def _facts(step: Path) -> CheckpointFacts:
    tree: dict[str, Any] = read_state(step)
    try:
        config = tree["config"]
        return CheckpointFacts(
            iteration=int(tree["run"]["iteration"]),
            metrics={name: float(value) for name, value in tree["metrics"].items()},
            forked_from=tree["forked_from"],
            output_dir=str(config["output_dir"]),
            name=str(config["name"]),
            load=str(config["checkpoint"]["load"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{step / STATE}: is not of this version: {type(error).__name__}: {error}") from error


def _latest(root: Path) -> str | None:
    file = root / LATEST
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _when(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # a running training removes old checkpoints
        return 0
