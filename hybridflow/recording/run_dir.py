"""What a run leaves behind: a directory, written by rank 0. An earlier run of that name is kept beside it."""

import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def open_run_dir(path: Path, config_yaml: str) -> Path | None:
    """Create `path` with the resolved config. What stood there moves to `path`.1, .2, ...; where it went, if it did."""
    moved = _free_name(path) if path.exists() else None
    if moved is not None:
        path.rename(moved)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config_yaml)
    return moved


def _free_name(path: Path) -> Path:
    return next(name for i in count(1) if not (name := path.with_name(f"{path.name}.{i}")).exists())


def dump_batch(run_dir: Path, name: str, tensors: Mapping[str, Tensor]) -> Path:
    """Write batches/NAME.safetensors: every tensor of a batch, whole or not at all."""
    directory = run_dir / "batches"
    directory.mkdir(exist_ok=True)
    target = directory / f"{name}.safetensors"
    partial = target.with_suffix(".partial")
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, partial
    )  # it refuses two names of one memory
    os.replace(partial, target)
    return target
