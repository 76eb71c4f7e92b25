"""What a resumed run keeps of the files in the run directory: all up to the checkpoint, and nothing after.

A run that ends in the middle of an iteration may leave rows of iterations that will be run again, half a line, and
batches that no longer belong to it. Cut back to what they were after the checkpoint's iteration, the files of a resumed
run end up byte for byte like those of one that was never interrupted.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.recording.run_dir import dumped_iteration, replace_file


@dataclass(frozen=True)
class KeptMetrics:
    """Columns and rows of a metrics.csv as they were after some iteration; every cell as it is written."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def numbers(self) -> list[dict[str, float]]:
        """Of each row what it has a value of."""
        return [{name: float(cell) for name, cell in zip(self.columns, row, strict=True) if cell} for row in self.rows]

    def missing(self, last: int) -> list[int]:
        """The iterations 1 .. last without a row."""
        present = {int(row[0]) for row in self.rows}
        return [iteration for iteration in range(1, last + 1) if iteration not in present]


def kept_metrics(file: Path, last: int) -> KeptMetrics | None:
    """The rows of iterations up to `last`, with the columns that they have values in. None: there is no such file.

    A column that none of them has came with a later row, and comes again with it. What follows a line that is none of
    ours, or is cut short, is lost: lines are written in order, and those up to a checkpoint are on the disk before it.
    """
    try:
        text = file.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None
    complete = text[: text.rfind("\n") + 1]
    header, rows = _table(complete)
    kept = [row for row in rows if int(row[0]) <= last]
    filled = [i for i in range(len(header)) if i == 0 or any(row[i] for row in kept)]
    return KeptMetrics(
        columns=tuple(header[i] for i in filled),
        rows=tuple(tuple(row[i] for i in filled) for row in kept),
    )


def _table(text: str) -> tuple[list[str], list[list[str]]]:
    """The header, and the rows up to the first that is none."""
    lines = csv.reader(io.StringIO(text, newline="\n"), strict=True)
    rows: list[list[str]] = []
    try:
        header = next(lines, [])
        if header[:1] != ["iteration"]:
            return ["iteration"], []
        for row in lines:
            if len(row) != len(header) or not _is_row(row):
                break
            rows.append(row)
    except csv.Error:  # a quote that nothing closes: the file is cut or overwritten there
        return (header, rows) if rows else (["iteration"], [])
    return header, rows


def _is_row(cells: list[str]) -> bool:
    try:
        return cells[0].isascii() and cells[0].isdecimal() and all(cell == "" or _is_number(cell) for cell in cells)
    except ValueError:
        return False


def _is_number(cell: str) -> bool:
    float(cell)
    return True


def cut_samples(file: Path, last: int) -> None:
    """Leave in samples.jsonl the lines of iterations up to `last`, if there is the file."""
    if file.exists():
        replace_file(file, _kept_samples(file, last))


def _kept_samples(file: Path, last: int) -> Iterator[bytes]:
    with file.open("rb") as lines:
        for line in lines:
            iteration = _iteration_of(line)
            if iteration is None:  # cut short, or none of ours: as with metrics.csv nothing of worth follows
                return
            if iteration <= last:
                yield line


def _iteration_of(line: bytes) -> int | None:
    try:
        sample = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    found = sample.get("iteration") if isinstance(sample, Mapping) else None
    return found if type(found) is int else None


def remove_batches(directory: Path, last: int) -> list[Path]:
    """Remove the dumped batches of iterations after `last`, and what half a write left; which they were.

    Later batches are not left to be overwritten: a run that ends earlier would keep batches without a record.
    A batch that was dumped because a number was not finite stays: it shows why that iteration ended.
    """
    later = [file for file in sorted(directory.glob("iteration_*.safetensors")) if (dumped_iteration(file) or 0) > last]
    _unlink([*later, *directory.glob("*.partial")])
    return later


def _unlink(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink()
