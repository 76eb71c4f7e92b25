"""Which files a path names: a file, a directory of files, one split of a directory, or a pattern.

A directory that `datasets.save_to_disk` has written holds Arrow files, and JSON that says which, in which order.

files_of_split(["train-0.parquet", "test-0.parquet"], "data.train", "gsm/main")     the first, and a line that says so
"""

import glob
import json
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hybridflow.errors import DataError

JSON = ".json"  # lines, or one array
JSON_LINES = (".jsonl", JSON, ".ndjson")
PARQUET, ARROW = ".parquet", ".arrow"
READ = (*JSON_LINES, PARQUET, ARROW)
TEXT_TABLES = {".csv": ",", ".tsv": r"\t"}  # read as text they say no types: 007 and 7 would be one answer
COMPRESSED = (".gz", ".zst")
# words of file names, as `datasets` looks for them
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
MOST_SHOWN = 10  # names in one message
SAVED_SPLITS, SAVED_STATE, SAVED_INFO = "dataset_dict.json", "state.json", "dataset_info.json"  # of save_to_disk


def local_files(path: Path, key: str) -> tuple[list[Path], tuple[str, ...]]:
    """The files, and what a person should know of the choice. A file is itself, whether it is there or not.

    A directory saved by `datasets` has an order already. Errors: DataError for a directory without data files, or with
    splits that `key` does not choose between; for a pattern that nothing matches.
    """
    if path.is_dir():
        saved = _saved_files(path, key)
        if saved is not None:
            return saved, ()
        names, notes = files_of_split([file.name for file in path.iterdir() if file.is_file()], key, str(path))
        return [path / name for name in names], notes
    if glob.has_magic(str(path)) and not path.exists():
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        files = [file for file in found if file.is_file()]
        if not files:
            raise DataError(f"{key} = {path}: is a pattern (glob) that no file matches")
        return files, (f"{key} = {path}: {_listed([file.name for file in files])}",)
    return [path], ()


def _saved_files(path: Path, key: str) -> list[Path] | None:
    """The files of a saved data set in their order; None where a directory is none.

    Errors: DataError for one that holds several splits, with their paths, or rows chosen by an index.
    """
    if (path / SAVED_SPLITS).is_file():
        names = _read_object(path / SAVED_SPLITS).get("splits")
        splits = [str(path / name) for name in names] if isinstance(names, list) else []
        raise DataError(
            f"{key} = {path}: holds several splits, saved by datasets.save_to_disk ({SAVED_SPLITS}); name one of them: "
            f"{', '.join(splits) or 'the directories in it'}"
        )
    if not ((path / SAVED_STATE).is_file() and (path / SAVED_INFO).is_file()):
        return None
    state = _read_object(path / SAVED_STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{path / SAVED_STATE}: its rows are chosen by an index (_indices_data_files); save it again after "
            f"dataset.flatten_indices()"
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(item, dict) and "filename" in item for item in listed):
        return sorted(file for file in path.iterdir() if file.suffix == ARROW)
    return [path / item["filename"] for item in listed]


def _read_object(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{file}: holds a {type(tree).__name__}, expected an object")
    return tree


def files_of_split(names: Sequence[str], key: str, directory: str) -> tuple[list[str], tuple[str, ...]]:
    """Of the names in a directory the data files, in order: of one split, where file names tell several.

    data.heldout takes the split that is not train's, any other key train's. Errors: DataError as `local_files`.
    """
    data = sorted(name for name in names if is_data(name))
    if not data:
        tables = sorted(name for name in names if PurePosixPath(name).suffix in TEXT_TABLES)
        raise DataError(
            f"{directory}: is a directory without {', '.join(READ[:-1])} or {ARROW} files, compressed or not; the "
            f"directory holds {_listed(sorted(names)) or 'nothing'}"
            f"{to_parquet(Path(directory) / tables[0]) if tables else ''}"
        )
    splits = {name: split_of(name) for name in data}
    found = sorted({split for split in splits.values() if split is not None})
    if len(found) < 2:
        return data, ()
    wanted = [split for split in found if (split == "train") != key.startswith("data.heldout")]
    if len(wanted) != 1:
        raise DataError(
            f"{key} = {directory}: holds the splits {', '.join(found)} by the names of its files. Name the files of "
            f"one, such as {directory}/{_pattern(next(name for name in data if splits[name] == (wanted or found)[0]))}"
        )
    taken = [name for name in data if splits[name] == wanted[0]]
    left = [name for name in data if splits[name] != wanted[0]]
    return taken, (f"{key} = {directory}: takes the split {wanted[0]}: {_listed(taken)}; not {_listed(left)}",)


def split_of(name: str) -> str | None:
    """By a word of the file's name: train of "train-00000-of-00001.parquet"; None of "math.jsonl"."""
    return next((SPLITS[word] for word in re.split(r"[^a-z0-9]+", name.lower()) if word in SPLITS), None)


def is_data(name: str) -> bool:
    """Whether the suffix is one that is read, compressed JSON lines included."""
    path = PurePosixPath(name)
    return path.suffix in READ or (path.suffix in COMPRESSED and PurePosixPath(path.stem).suffix in JSON_LINES)


def to_parquet(path: Path) -> str:
    """How to make Parquet of a table that is text, after looking at the types that pyarrow gives the columns."""
    delimiter = TEXT_TABLES[path.suffix]
    return (
        f"; this makes Parquet of it, with the types that pyarrow finds:\n"
        f"    import pyarrow.csv, pyarrow.parquet\n"
        f"    how = pyarrow.csv.ParseOptions(delimiter='{delimiter}', newlines_in_values=True)\n"
        f"    table = pyarrow.csv.read_csv('{path}', parse_options=how)\n"
        f"    pyarrow.parquet.write_table(table, '{path.with_suffix(PARQUET)}')"
    )


def _pattern(name: str) -> str:
    """`train-*.parquet` of `train-00000-of-00001.parquet`; a name without such a number stays."""
    return re.sub(r"[-_.]\d+(-of-\d+)?", "-*", name, count=1)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
