"""A directory that appears whole or not at all.

A conversion writes beside the target under a hidden name, brings all to the disk, and renames at the end. What a killed
conversion left is removed by the next one to the same target.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.convert.processes import Processes
from hybridflow.convert.progress import size_text
from hybridflow.data.tokenizers import keep_tokenizer_class
from hybridflow.errors import CheckpointError
from hybridflow.formats.directories import replace_directory, sync
from hybridflow.formats.huggingface_files import copy_companions, write_config

SPARE_BYTES = 16 << 20  # metadata, and what a file system needs beside the bytes of files


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Errors: CheckpointError where `target` may not be written."""
    target, source = target.resolve(), source.resolve()
    if target == source:
        raise CheckpointError(f"{target}: source and target are the same directory")
    if source in target.parents or target in source.parents:
        raise CheckpointError(f"{target}: source and target lie in one another; the source is {source}")
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target}: exists and is no directory")
    if not overwrite:
        raise CheckpointError(f"{target}: exists; --overwrite replaces it")
    if any(target.iterdir()) and not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise CheckpointError(
            f"{target}: has no config.json and is therefore no checkpoint. --overwrite replaces only checkpoints"
        )


def write_companions(
    source: Path,
    directory: Path,
    config_changes: Mapping[str, Any],
    *,
    section: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool,
) -> list[str]:
    """config.json, tokenizer, generation config and chat template; what the user should know of it."""
    write_config(source, directory, config_changes, section=section, dtype=dtype, trust_remote_code=trust_remote_code)
    copy_companions(source, directory, trust_remote_code=trust_remote_code)
    keep_tokenizer_class(source, directory)
    code = [] if trust_remote_code else sorted(file.name for file in source.glob("*.py"))
    return [f"not copied: {', '.join(code)}: --trust-remote-code copies code"] if code else []


@contextlib.contextmanager
def new_directory(target: Path, *, num_bytes: int, processes: Processes) -> Iterator[Path]:
    """Where to write what is to be `target` once the block is left; all processes enter and leave it.

    num_bytes: of what will be written. Errors: CheckpointError where the disk has too little room, or another
    conversion to `target` is at work. After any error nothing is left.
    """
    target = target.resolve()
    partial = target.with_name(f".{target.name}.partial")
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        with _claimed(partial, num_bytes) if processes.first else contextlib.nullcontext():
            processes.barrier()
            try:
                if not partial.is_dir():
                    raise CheckpointError(f"{partial}: is not there: all processes must see the disk of the target")
                yield partial
                processes.barrier()  # every file is written
                _sync(partial)
                processes.barrier()
                if processes.first:
                    replace_directory(partial, target)
                    sync(target.parent)
                processes.barrier()
            except BaseException as error:
                processes.tell_first(error)  # before others meet what is missing now
                _remove(partial)
                raise
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # others may have used it meanwhile
                parent.rmdir()
        raise


@contextlib.contextmanager
def _claimed(partial: Path, num_bytes: int) -> Iterator[None]:
    """The directory, empty, for this process alone: the lock on it ends with the process."""
    if partial.exists():
        with _locked(partial):
            shutil.rmtree(partial)
    existing = next(parent for parent in partial.parents if parent.exists())
    free, needed = shutil.disk_usage(existing).free, num_bytes + SPARE_BYTES
    if free < needed:
        raise CheckpointError(
            f"{existing}: too little room on the disk: {needed:,} bytes are needed ({size_text(needed)}), "
            f"{free:,} are free ({size_text(free)})"
        )
    partial.mkdir(parents=True)
    with _locked(partial):
        yield


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{directory}: another conversion is writing here; wait for its end") from error
        except OSError:  # a network file system that locks no directories: then two at once are not noticed
            pass
        yield
    finally:
        os.close(descriptor)


def _sync(directory: Path) -> None:
    """Bring everything below to the disk, so that a finished name never stands for unfinished bytes."""
    for path in sorted(directory.rglob("*")):
        sync(path)
    sync(directory)


def _remove(directory: Path) -> None:
    """Other processes may still be writing; none of them can once it is gone."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
