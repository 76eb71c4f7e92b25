"""Directories that are complete and on the disk, or are not there."""

import os
import shutil
from pathlib import Path


def replace_directory(partial: Path, target: Path) -> None:
    """Move a finished directory to `target`. The old target goes away only then, and is back if the move fails."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file or a directory on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
