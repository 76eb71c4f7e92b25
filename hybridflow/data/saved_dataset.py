"""Directories that `datasets.save_to_disk` has written: Arrow files, and JSON that says which, in which order."""

import json
from pathlib import Path
from typing import Any

from hybridflow.errors import DataError

SPLITS, STATE, INFO, ARROW = "dataset_dict.json", "state.json", "dataset_info.json", ".arrow"


def saved_files(path: Path, key: str) -> list[Path] | None:
    """The files of a saved data set in their order; None where a directory is none.

    Errors: DataError for one that holds several splits, with their paths, or rows chosen by an index.
    """
    if (path / SPLITS).is_file():
        names = _read(path / SPLITS).get("splits")
        splits = [str(path / name) for name in names] if isinstance(names, list) else []
        raise DataError(
            f"{key} = {path}: holds several splits, saved by datasets.save_to_disk ({SPLITS}); name one of them: "
            f"{', '.join(splits) or 'the directories in it'}"
        )
    if not ((path / STATE).is_file() and (path / INFO).is_file()):
        return None
    state = _read(path / STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{path / STATE}: its rows are chosen by an index (_indices_data_files); save it again after "
            f"dataset.flatten_indices()"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(item, dict) and "filename" in item for item in listed):
        return sorted(file for file in path.iterdir() if file.suffix == ARROW)
    return [path / item["filename"] for item in listed]


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{file}: holds a {type(tree).__name__}, expected an object")
    return tree
