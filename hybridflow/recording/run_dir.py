"""What a run leaves behind: a directory, written by rank 0. An earlier run of that name is kept beside it."""

import dataclasses
import os
from pathlib import Path

from safetensors.torch import save_file

from hybridflow.batch import TrainBatch


def open_run_dir(path: Path, config_yaml: str) -> Path | None:
    """Create `path` with the resolved config. What stood there moves to `path`.1, .2, ...; where it went, if it did."""
    moved = None
    if path.exists():
        number = 1
        while (moved := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(moved)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config_yaml)
    return moved


def dump_batch(run_dir: Path, iteration: int, batch: TrainBatch) -> None:
    """Write batches/iteration_NNNNNN.safetensors: every tensor of the batch, whole or not at all."""
    directory = run_dir / "batches"
    directory.mkdir(exist_ok=True)
    tensors = {field.name: getattr(batch, field.name).contiguous() for field in dataclasses.fields(batch)}
    target = directory / f"iteration_{iteration:06d}.safetensors"
    partial = target.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, target)
