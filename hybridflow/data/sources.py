"""The files that a config names, as one list of rows: a file, a directory of files, or several with weights.

Rows of tasks of reasoning-gym are files as well, which are made where they are missing (`data/gym_files.py`).

files = open_files("data/train.jsonl", "data.train")
files = open_files((SourceConfig(path="math", weight=2), SourceConfig(path="code.parquet", weight=1)), "data.train")
"""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from hybridflow.config.data import DataFiles, HubSourceConfig, Source, SourceConfig, sources_of
from hybridflow.config.hub import is_hub_name
from hybridflow.config.reasoning_gym import ReasoningGymConfig, TaskConfig
from hybridflow.data.copies import check_no_archive, copies_of, is_remote, make_copies, needs_copy
from hybridflow.data.gym_files import rows_of_task
from hybridflow.data.hub_data_sets import fetch_data_set, files_of_data_set
from hybridflow.data.json_rows import JsonRows
from hybridflow.data.listing import ARROW, JSON_LINES, PARQUET, TEXT_TABLES, local_files, to_parquet
from hybridflow.data.order import MOST_TURNS, shares
from hybridflow.data.rows import DataRows, Row
from hybridflow.errors import DataError


class Files:
    """The rows of several sources, one after the other.

    names: of the sources; ends: the number of rows up to the end of each source; weights: of sources, None without.
    notes: which files were chosen, where a person has not named each.
    """

    def __init__(
        self,
        sources: Sequence[tuple[str, Sequence[DataRows]]],
        weights: tuple[float, ...] | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.names, self.notes = tuple(name for name, _ in sources), notes
        self.weights = weights
        self._files = [file for _, files in sources for file in files]
        self._file_ends = list(accumulate(len(file) for file in self._files))
        self.ends = tuple(accumulate(sum(len(file) for file in files) for _, files in sources))

    def __len__(self) -> int:
        return self.ends[-1]

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """In this order; one may appear twice. Errors: DataError if a file is not what it was."""
        homes = [bisect_right(self._file_ends, number) for number in numbers]
        found: dict[int, Row] = {}
        for home in sorted(set(homes)):
            start = self._file_ends[home] - len(self._files[home])
            wanted = [number for number, at in zip(numbers, homes, strict=True) if at == home]
            found |= zip(wanted, self._files[home].rows_at([number - start for number in wanted]), strict=True)
        return [found[number] for number in numbers]

    @property
    def digest(self) -> bytes:
        """Of what the files hold, in their order; not of their names."""
        digests = [file.digest for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.blake2b(b"".join(digests), digest_size=16).digest()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files)


def fetch(named: DataFiles | Path, key: str) -> None:
    """Bring here what the config's `key` names elsewhere, and expand what is compressed. Errors: DataError."""
    for source in () if isinstance(named, ReasoningGymConfig) else _sources(named):
        if isinstance(source, HubSourceConfig):
            fetch_data_set(source, key)
        elif isinstance(source, SourceConfig):
            make_copies(source.path, key)


def open_files(named: DataFiles | Path, key: str) -> Files:
    """What the config's `key` names, fetched. Errors: DataError where a file cannot be read or holds nothing."""
    sources = _sources(named)
    found = _found(named, key)
    opened = [(source.title, [_opened(file) for file in files]) for source, files, _ in found]
    for title, files in opened:
        if not any(len(file) for file in files):
            raise DataError(f"{title}: holds no row ({key}); expected JSON (lines or an array), Parquet or Arrow")
    weights = tuple(source.weight for source in sources if source.weight is not None)
    for source, share in zip(sources, shares(weights) if weights else (), strict=False):
        if not share:
            raise DataError(
                f"{key}: the weight {source.weight} of {source.title} is less than one row in {MOST_TURNS:,}. Leave "
                "the file out, or give a larger weight"
            )
    return Files(opened, weights or None, tuple(note for *_, notes in found for note in notes))


def data_files(named: DataFiles | Path, key: str) -> list[Path]:
    """The files that the config's `key` names, none of which is opened. Errors: DataError where one is not there."""
    files = [file for _, some, _ in _found(named, key) for file in some]
    for file in files:
        if not file.is_file():
            of_the_hub = is_hub_name(str(file)) and file.suffix not in (*JSON_LINES, PARQUET, ARROW, *TEXT_TABLES)
            hint = f"; a data set of the Hub is {{hub: {file}, split: train}}" if of_the_hub else ""
            raise DataError(f"{key} = {file}: no such file{hint}")
    return files


def _sources(named: DataFiles | Path) -> Sequence[Source | TaskConfig]:
    return sources_of(str(named) if isinstance(named, Path) else named)


Found = tuple[list[Path], tuple[str, ...]]  # files, and notes on the choice


def _found(named: DataFiles | Path, key: str) -> list[tuple[Source | TaskConfig, list[Path], tuple[str, ...]]]:
    """(source, files, notes)."""
    if isinstance(named, ReasoningGymConfig):
        tasks = enumerate(named.reasoning_gym)
        return [(task, [rows_of_task(task, named.system_prompt, f"{key}.reasoning_gym.{i}")], ()) for i, task in tasks]
    return [(source, *_files_of(source, key)) for source in _sources(named)]


def _files_of(source: Source | TaskConfig, key: str) -> Found:
    assert not isinstance(source, TaskConfig), "tasks have a place in their section"
    if isinstance(source, HubSourceConfig):
        return files_of_data_set(source, key), ()
    if is_remote(source.path):
        return copies_of(source.path, key)
    files, notes = local_files(Path(source.path), key)
    return [copy for file in files for copy in (copies_of(file, key)[0] if needs_copy(file) else [file])], notes


def _opened(path: Path) -> DataRows:
    check_no_archive(path)
    if path.suffix in TEXT_TABLES and path.is_file():
        raise DataError(f"{path}: {path.suffix[1:].upper()} is not read{to_parquet(path)}")
    if path.suffix not in (PARQUET, ARROW) and not _begins_as_parquet(path):
        return JsonRows(path)
    from hybridflow.data.columnar import Columnar  # whose pyarrow takes 60 MB: only where there is such a file

    return Columnar(path)


def _begins_as_parquet(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"
