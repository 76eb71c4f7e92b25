"""What a run leaves behind: a directory, written by rank 0. An earlier run of that name is kept beside it."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.errors import RecordError, RunDirError, UserError
from hybridflow.formats.json_text import parse_json
from hybridflow.parallel.layout import Layout, RolloutLayout


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Errors: RecordError, which names the file, where the block cannot write it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        path, why = getattr(error, "filename", None) or file, getattr(error, "strerror", None) or error
        raise RecordError(f"{path}: cannot be written: {why}") from error


def open_run_dir(path: Path, config_yaml: str) -> Path | None:
    """Create `path` with the resolved config. What stood there moves to `path`.1, .2, ...; where it went, if it did.

    Logs alone are no run: of a start that failed before it, or of the one that is under way.
    """
    moved = _free_name(path) if path.exists() and {file.name for file in path.iterdir()} - {"logs"} else None
    if moved is not None:
        path.rename(moved)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
    return moved


def reopen_run_dir(path: Path, config_yaml: str) -> Path | None:
    """Write the resolved config of a resumed run. A former config that differs stays as config.yaml.1, .2, ...; the
    result is the path of that former config."""
    path.mkdir(parents=True, exist_ok=True)
    file = path / "config.yaml"
    former = file.read_bytes() if file.exists() else None
    if former == config_yaml.encode():
        return None
    kept = None
    if former is not None:
        kept = _free_name(file)
        replace_file(kept, [former])
    replace_file(file, [config_yaml.encode()])
    return kept


def replace_file(target: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole: a reader, and who comes after a crash, finds the former one or this one, never half.

    Errors: RecordError.
    """
    temporary = target.with_name(f"{target.name}.tmp")
    with writing(target):
        with temporary.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())  # else the name may reach the disk before the bytes
        os.replace(temporary, target)


def _free_name(path: Path) -> Path:
    return next(name for i in count(1) if not (name := path.with_name(f"{path.name}.{i}")).exists())


def dump_batch(run_dir: Path, name: str, tensors: Mapping[str, Tensor]) -> Path:
    """Write batches/NAME.safetensors: every tensor of a batch, whole or not at all. Errors: RecordError."""
    target = run_dir / "batches" / f"{name}.safetensors"
    partial = target.with_suffix(".partial")
    # save_file refuses two names of one memory
    apart = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    with writing(target):
        target.parent.mkdir(exist_ok=True)
        save_file(apart, partial)
        os.replace(partial, target)
    return target


def dumped_iteration(file: Path) -> int | None:
    """NNNNNN of iteration_NNNNNN.safetensors; None for other names."""
    found = re.fullmatch(r"iteration_([0-9]+)\.safetensors", file.name)
    return int(found[1]) if found else None


LAYOUT = "layout.json"


@dataclass(frozen=True)
class RunLayout:
    world_size: int
    roles: Mapping[str, Layout]  # "actor", "reward.models.0", ...
    rollout: RolloutLayout | None  # None: nothing is generated


def write_layout(
    run_dir: Path,
    world_size: int,
    roles: Mapping[str, Layout],
    rollout: RolloutLayout | None,
    kv_cache: Mapping[str, Any] | None = None,
) -> None:
    """A run that resumes in another layout keeps the latest one. kv_cache: the cache's size, for people."""
    tree = {
        "world_size": world_size,
        "roles": {name: _tree(layout) for name, layout in roles.items()},
        "rollout": rollout and _fields(rollout, "tp pp replicas expert_parallel"),
    }
    if kv_cache is not None:
        tree["kv_cache"] = dict(kv_cache)
    replace_file(run_dir / LAYOUT, [json.dumps(tree).encode() + b"\n"])


def _tree(layout: Layout) -> dict[str, Any]:
    return _fields(layout, "tp pp dp vpp ranks ep etp" + " cp" * (layout.cp > 1))


def _fields(layout: Layout | RolloutLayout, names: str) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in names.split()}


def _layout(*, tp: int, pp: int, dp: int, ranks: Sequence[int], cp: int = 1, **more: Any) -> Layout:
    """Older versions wrote dp x cp as dp."""
    return Layout(tp, pp, dp // cp if tp * pp * dp == len(ranks) else dp, tuple(ranks), cp=cp, **more)


def read_layout(run_dir: Path) -> RunLayout | None:
    """None where there is none: versions before it did not write one. Errors: RunDirError where it is damaged."""
    file = run_dir / LAYOUT
    if not file.exists():
        return None
    try:
        tree = parse_json(file.read_bytes(), "")
        roles = {name: _layout(**role) for name, role in tree["roles"].items()}
        engine = tree["rollout"]
        rollout = engine and RolloutLayout(**engine | {"replicas": tuple(map(tuple, engine["replicas"]))})
        return RunLayout(tree["world_size"], roles, rollout)
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise RunDirError(f"{file}: is damaged: {error}") from error
