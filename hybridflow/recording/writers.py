"""Where numbers and samples go: metrics.csv, TensorBoard, samples.jsonl.

Metrics are floats or one-element tensors until they reach `MetricsWriter.write`; reading a device's tensors
waits for the device, and it happens only there. Equal metrics give an equal metrics.csv, byte for byte.
"""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

from torch import Tensor


class MetricsWriter:
    """Writes one row of metrics an iteration to RUN_DIR/metrics.csv and RUN_DIR/tensorboard.

    Opening it starts the record afresh: an earlier metrics.csv is emptied, earlier TensorBoard events are
    hidden.
    """

    def __init__(self, run_dir: str | Path, *, csv: bool, tensorboard: bool) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[_CsvFile | _TensorBoardFiles] = []
        if csv:
            self._sinks.append(_CsvFile(run_dir / "metrics.csv"))
        if tensorboard:
            self._sinks.append(_TensorBoardFiles(run_dir / "tensorboard"))

    def write(self, iteration: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Add a row, on disk when this returns. NaN is allowed; a metric may be absent from any row."""
        values = {name: _number(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.write(iteration, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Sample(TypedDict):
    prompt: str
    response: str
    score: float | Tensor | None


class SampleWriter:
    """Writes responses as JSON lines, for a person to read. Opening it empties the file, like metrics.csv."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # backslashreplace writes half a surrogate pair as JSON's own escape
        self._file = open(path, "w", encoding="utf-8", errors="backslashreplace")

    def write(self, iteration: int, rows: Sequence[Sample]) -> None:
        for row in rows:
            sample = {
                "iteration": iteration,
                "prompt": row["prompt"],
                "response": row["response"],
                "score": None if row["score"] is None else _number(row["score"]),
            }
            self._file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _CsvFile:
    """A CSV file whose columns may grow: a row with new ones makes the file be written anew, older rows get
    empty cells. Columns stand in order of appearance, after `iteration`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = ["iteration"]
        self._replace([])
        self._file = path.open("a", newline="")

    def write(self, iteration: int, values: dict[str, float]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._widen(new)
        cells = {"iteration": str(iteration), **{name: repr(value) for name, value in values.items()}}
        _csv_writer(self._file).writerow([cells.get(name, "") for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        self._file.close()
        with self._path.open(newline="") as file:
            rows = list(csv.reader(file))[1:]
        self._columns += new
        self._replace(rows)
        self._file = self._path.open("a", newline="")

    def _replace(self, rows: list[list[str]]) -> None:
        """Put a file of these rows in place of the present one; a reader sees either, never half."""
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        with temporary.open("w", newline="") as file:
            writer = _csv_writer(file)
            writer.writerow(self._columns)
            writer.writerows(row + [""] * (len(self._columns) - len(row)) for row in rows)
        os.replace(temporary, self._path)


class _TensorBoardFiles:
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported for those who asked for it

        # purge_step: TensorBoard leaves out what earlier event files of the directory say from this step on
        self._writer = SummaryWriter(str(directory), purge_step=0)

    def write(self, iteration: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_csv_writer = partial(csv.writer, lineterminator="\n")


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)
