"""Where numbers and samples go: metrics.csv, TensorBoard, samples.jsonl; services in `hybridflow.recording.trackers`.

Metrics are floats or one-element tensors until they reach `MetricsWriter.write`; reading a device's tensors
waits for the device, and it happens only there. Equal metrics give an equal metrics.csv, byte for byte, also where a
run was interrupted and goes on.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hybridflow.formats.directories import sync
from hybridflow.recording.resume import KeptMetrics, cut_samples, kept_metrics
from hybridflow.recording.run_dir import replace_file
from hybridflow.recording.samples import Sample


class Sink(Protocol):
    """What gets a row of numbers an iteration."""

    def write(self, iteration: int, values: dict[str, float]) -> None: ...

    def sync(self) -> None:
        """What must outlive the machine is on the disk when this returns."""

    def close(self) -> None: ...


class MetricsWriter:
    """Writes one row of metrics an iteration to RUN_DIR/metrics.csv and RUN_DIR/tensorboard.

    Opening it starts the record afresh: an earlier metrics.csv is emptied, earlier TensorBoard events are
    hidden. With `resumed` that holds for what follows this iteration; what precedes it is in `kept`, None where
    there was no metrics.csv. others: what gets the rows, too, after the files.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        csv: bool,
        tensorboard: bool,
        resumed: int | None = None,
        others: Sequence[Sink] = (),
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        file = run_dir / "metrics.csv"
        self.kept: KeptMetrics | None = None if resumed is None else kept_metrics(file, resumed)
        self._sinks: list[Sink] = []
        if csv:
            self._sinks.append(_CsvFile(file, self.kept))
        elif self.kept is not None:  # no longer written, but not left with iterations that are run again
            _CsvFile(file, self.kept).close()
        if tensorboard:
            self._sinks.append(_TensorBoardFiles(run_dir / "tensorboard", 0 if resumed is None else resumed + 1))
        self._sinks += others

    def write(self, iteration: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Add a row, on disk when this returns. NaN is allowed; a metric may be absent from any row."""
        values = {name: _number(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.write(iteration, values)

    def sync(self) -> None:
        """metrics.csv is on the disk when this returns, whatever happens to the machine."""
        for sink in self._sinks:
            sink.sync()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class SampleWriter:
    """Writes responses as JSON lines, for a person to read. Opening it empties the file, like metrics.csv; with
    `resumed` the lines up to that iteration stay."""

    def __init__(self, path: str | Path, *, resumed: int | None = None) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if resumed is not None:
            cut_samples(self._path, resumed)
        # backslashreplace writes half a surrogate pair as JSON's own escape
        mode = "w" if resumed is None else "a"
        self._file = open(path, mode, encoding="utf-8", errors="backslashreplace")

    def write(self, iteration: int, rows: Sequence[Sample]) -> None:
        for row in rows:
            sample = {
                "iteration": iteration,
                "kind": row["kind"],
                "prompt": row["prompt"],
                "response": row["response"],
                "score": None if row["score"] is None else _number(row["score"]),
                "parts": dict(row["parts"]),
                "columns": dict(row["columns"]),
                **({"turns": row["turns"]} if row.get("turns") else {}),
            }
            self._file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        os.fsync(self._file.fileno())
        sync(self._path.parent)

    def close(self) -> None:
        self._file.close()


class _CsvFile:
    """A CSV file whose columns may grow: a row with new ones makes the file be written anew, older rows get
    empty cells. Columns stand in order of appearance, after `iteration`."""

    def __init__(self, path: Path, kept: KeptMetrics | None) -> None:
        self._path = path
        self._columns: list[str] = list(kept.columns) if kept else ["iteration"]
        self._replace(kept.rows if kept else ())
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, iteration: int, values: dict[str, float]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._widen(new)
        cells = {"iteration": str(iteration), **{name: repr(value) for name, value in values.items()}}
        _csv_writer(self._file).writerow([cells.get(name, "") for name in self._columns])
        self._file.flush()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        sync(self._path.parent)  # the name, where the file is new

    def close(self) -> None:
        self._file.close()

    def _widen(self, new: list[str]) -> None:
        self._file.close()
        with self._path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))[1:]
        self._columns += new
        self._replace(rows)
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _replace(self, rows: Iterable[Sequence[str]]) -> None:
        """Put a file of these rows in place of the present one; a reader sees either, never half."""
        text = io.StringIO(newline="")
        writer = _csv_writer(text)
        writer.writerow(self._columns)
        writer.writerows([*row, *[""] * (len(self._columns) - len(row))] for row in rows)
        replace_file(self._path, [text.getvalue().encode()])


class _TensorBoardFiles:
    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported for those who asked for it

        # purge_step: TensorBoard leaves out what earlier event files of the directory say from this step on
        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, iteration: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def sync(self) -> None:
        """Only metrics.csv is read back; curves may lack their last points after a power cut."""

    def close(self) -> None:
        self._writer.close()


_csv_writer = partial(csv.writer, lineterminator="\n")


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)
