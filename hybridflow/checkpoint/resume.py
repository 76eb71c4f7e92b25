"""Which checkpoint a run goes on from, and loading it.

    source = find_source(config, restarts=platforms.restart_count(), group=world)
    if source is not None:
        restore(source, roles.trained(), world)

checkpoint.load   auto    the newest intact checkpoint of the run directory, if it has any
                  none    nothing; where torchrun has restarted the ranks as auto, or they would start anew for ever
                  PATH    a checkpoint, or a run directory's newest: a fork, with a new run directory. Once the fork's
                          directory has a checkpoint, the fork resumes from there, and survives restarts as any run does
"""

import contextlib
import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hybridflow.batch import balanced_partition
from hybridflow.checkpoint.sharded import SavedRole, load
from hybridflow.checkpoint.state import SavedRun, load_state
from hybridflow.checkpoint.store import CHECKPOINTS, MANIFEST, damage, read_manifest, step_name, steps
from hybridflow.config import RunConfig
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.directories import sync
from hybridflow.formats.distributed_directory import DistributedDirectory
from hybridflow.parallel.agreement import failures
from hybridflow.roles.policy import Reference


@dataclass(frozen=True)
class ResumeSource:
    """What a run goes on from."""

    step: Path
    saved: SavedRun
    is_fork: bool  # of another run, or of this one under another name
    forked_from: str | None  # as the run says of itself
    notes: tuple[str, ...]  # what was found damaged


def find_source(config: RunConfig, *, restarts: int, group: dist.ProcessGroup) -> ResumeSource | None:
    """The newest intact checkpoint of where `checkpoint.load` points; None where there is none to go on from.

    Each rank reads a share of the files, and all files are checked. Collective. Errors: CheckpointError where there
    are checkpoints and none is intact, ConfigError for a path without checkpoints.
    """
    found: list[tuple[list[Path], bool] | str | None] = [None]
    if group.rank() == 0:
        try:
            found[0] = _candidates(config, restarts)
        except (CheckpointError, ConfigError, OSError) as error:
            found[0] = str(error)
    dist.broadcast_object_list(found, src=dist.get_process_group_ranks(group)[0], group=group)
    if isinstance(found[0], str):
        raise ConfigError(found[0])
    if found[0] is None:
        return None
    candidates, is_fork = found[0]
    damaged: list[str] = []
    for step in candidates:
        problems = failures(_damage_found_here(step, group), group)
        if not problems:
            saved = load_state(step)
            forked_from = str(Path(config.checkpoint.load).resolve()) if is_fork else saved.forked_from
            return ResumeSource(step, saved, is_fork, forked_from, tuple(f"warning: {line}" for line in damaged))
        damaged.append(f"{step} is not intact and is left out: {'; '.join(problems)}")
    raise CheckpointError("\n".join([*damaged, "no checkpoint is intact; checkpoint.load=none starts anew"]))


def restore(source: ResumeSource, roles: Sequence[SavedRole], group: dist.ProcessGroup) -> None:
    """Fill weights and optimizers. A reference that was not reset so far stays as it is.

    Collective. Errors: CheckpointError, on every rank.
    """
    files, failure = _directories(source.step, roles, group), None
    try:
        for role in roles:
            if role.name in files:
                load(role, files[role.name])
    except (CheckpointError, OSError, ValueError) as error:  # a rank must not leave alone
        failure = str(error)
    found = failures(failure, group)
    if found:
        raise CheckpointError("; ".join(found))


def _directories(
    step: Path, roles: Sequence[SavedRole], group: dist.ProcessGroup
) -> Mapping[str, DistributedDirectory]:
    """By role, on every rank as the first one read it: every chunk of every rank is described there.

    Collective. Errors: CheckpointError, on every rank.
    """
    found: list[dict[str, DistributedDirectory] | str | None] = [None]
    if group.rank() == 0:
        try:
            found[0] = {
                role.name: DistributedDirectory(step / role.name)
                for role in roles
                if not isinstance(role, Reference) or (step / role.name).is_dir()
            }
        except (CheckpointError, OSError) as error:
            found[0] = str(error)
    dist.broadcast_object_list(found, src=dist.get_process_group_ranks(group)[0], group=group)
    if not isinstance(found[0], dict):
        raise CheckpointError(str(found[0]))
    return found[0]


def check_progress(run_dir: Path, iteration: int, *, restarts: int, limit: int) -> None:
    """On rank 0, before a run goes on after `iteration`: raise unless torchrun's restarts bring it forward.

    A start by hand counts anew. The count lies beside the run directory, which moves away when a run starts anew.
    Errors: CheckpointError at the restart after `limit` that all began at one iteration.
    """
    file = run_dir.with_name(f".{run_dir.name}.restarts.json")
    if not restarts:
        if file.exists():
            file.unlink()
        return
    count = 1
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # none yet, or damaged: count anew
        last = json.loads(file.read_text(encoding="utf-8"))
        count = last["count"] + 1 if last["iteration"] == iteration else 1
    if count > limit:
        raise CheckpointError(
            f"{limit} restarts in a row began after iteration {iteration}, and none came to a later checkpoint: "
            f"checkpoint.max_restarts_without_progress = {limit}. Read {run_dir}/logs, then start the run by hand"
        )
    temporary = file.with_suffix(".partial")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps({"iteration": iteration, "count": count}), encoding="utf-8")
    sync(temporary)  # else a power loss could leave an empty file, with which no restart would begin
    os.replace(temporary, file)


def _candidates(config: RunConfig, restarts: int) -> tuple[list[Path], bool] | None:
    """(checkpoints, the newest first; whether they are another run's)."""
    own, where = config.run_dir / CHECKPOINTS, config.checkpoint.load
    if where == "none" and not restarts:
        return None
    if where in ("auto", "none"):
        return (_newest_first(own), False) if steps(own) else None
    path = Path(where)
    if any(_forked_from(step) == str(path.resolve()) for step in _newest_first(own)):
        return _newest_first(own), False
    if not path.is_dir():
        raise ConfigError(f"checkpoint.load = {where!r}: no such directory; auto and none are the other choices")
    if (path / MANIFEST).exists():
        return [path], True
    found = _newest_first(path / CHECKPOINTS) or _newest_first(path)
    if not found:
        raise ConfigError(f"checkpoint.load = {where!r}: is no checkpoint (no {MANIFEST}), and holds none")
    return found, True


def _newest_first(root: Path) -> list[Path]:
    return [root / step_name(iteration) for iteration in reversed(steps(root))]


def _forked_from(step: Path) -> str | None:
    try:
        return load_state(step).forked_from
    except CheckpointError:
        return None


def _damage_found_here(step: Path, group: dist.ProcessGroup) -> str | None:
    try:
        files = read_manifest(step).files
        load_state(step)
    except CheckpointError as error:
        return str(error)
    names = sorted(files)
    own = balanced_partition([files[name].size for name in names], group.size())[group.rank()]
    return "; ".join(damage(step, {names[i]: files[names[i]] for i in own})) or None


def save_notes(config: RunConfig, *, saves: bool) -> list[str]:
    """When the run is saved."""
    keys = config.checkpoint
    if not saves or keys.save_minutes is None:
        return []
    counted = f", and every {keys.save_interval} iterations" if keys.save_interval else ""
    return [f"saves every {keys.save_minutes:g} minutes (checkpoint.save_minutes){counted}"]


def keep_best_notes(config: RunConfig, *, saves: bool) -> list[str]:
    """Which checkpoints are the best ones."""
    keys = config.checkpoint
    if not (keys.keep_best and keys.saves and saves):
        return []
    every = config.metrics.eval_interval
    some = keys.best_metric.startswith("eval/") and every and (keys.save_interval % every or not keys.save_interval)
    known = f"; only iterations that metrics.eval_interval = {every} divides have this metric" if some else ""
    return [
        f"checkpoint.keep_best = {keys.keep_best}: the checkpoints with the {keys.keeps} {keys.best_metric} are kept "
        f"(checkpoint.best_is = {keys.best_is}){known}"
    ]


def known_metrics(metric: str, metrics: Iterable[str]) -> str:
    """The nearest names, or all."""
    return f"there are {', '.join(difflib.get_close_matches(metric, metrics) or sorted(metrics))}"


def missing_best_metric(metric: str, metrics: Mapping[str, float]) -> str:
    """A line on the metric of checkpoint.best_metric, which an iteration lacks."""
    return (
        f"warning: checkpoint.best_metric = {metric}: this iteration has no such metric. A checkpoint without the "
        f"metric is not kept as one of the best; {known_metrics(metric, metrics)}"
    )
