"""Where numbers and samples go: metrics.csv, TensorBoard, samples.jsonl; services in `hybridflow.recording.trackers`.

Metrics are floats or one-element tensors until they reach `MetricsWriter.write`; reading a device's tensors
waits for the device, and it happens only there. Equal metrics give an equal metrics.csv, byte for byte, also where a
run was interrupted and goes on.
"""

import csv
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch import Tensor

from hybridflow.errors import RecordError
from hybridflow.formats.directories import sync
from hybridflow.recording.resume import KeptMetrics, cut_samples, kept_metrics
from hybridflow.recording.run_dir import replace_file, writing
from hybridflow.recording.samples import Sample

EXPERTS_LOAD = "experts_load.csv"


class Sink(Protocol):
    """What gets a row of numbers an iteration."""

    def write(self, iteration: int, values: dict[str, float]) -> None: ...

    def sync(self) -> None:
        """What must outlive the machine is on the disk when this returns."""

    def close(self) -> None: ...


class SampleTable(Protocol):
    """What gets the samples of an iteration, before the iteration's row of numbers."""

    def write_samples(self, iteration: int, rows: Sequence[Sample]) -> None: ...


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
        with writing(run_dir):
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
        self._each(lambda sink: sink.write(iteration, values))

    def sync(self) -> None:
        """metrics.csv is on the disk when this returns, whatever happens to the machine."""
        self._each(lambda sink: sink.sync())

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        """Errors: RecordError, the first, when all have had their turn."""
        errors = []
        for sink in self._sinks:
            try:
                act(sink)
            except RecordError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class SampleWriter:
    """Writes responses as JSON lines, for a person to read. Opening it empties the file, like metrics.csv; with
    `resumed` the lines up to that iteration stay. tables: what gets the rows, too, after the file."""

    def __init__(self, path: str | Path, *, resumed: int | None = None, tables: Sequence[SampleTable] = ()) -> None:
        self._path, self._tables = Path(path), tables
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resumed is not None:
                cut_samples(self._path, resumed)
        # backslashreplace writes half a surrogate pair as JSON's own escape
        mode = "w" if resumed is None else "a"
        with writing(self._path):
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
                **({"set": row["set"]} if row.get("set") else {}),
            }
            with writing(self._path):
                self._file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        with writing(self._path):
            self._file.flush()
        for table in self._tables if rows else ():
            table.write_samples(iteration, rows)

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        with writing(self._path):
            os.fsync(self._file.fileno())
            sync(self._path.parent)

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


class ExpertsLoadWriter:
    """Writes the load of a mixture's experts to RUN_DIR/experts_load.csv: a row an iteration, column `layer_N` a layer.

    A run without experts has no such file. csv: False: nothing is written. resumed: rows up to this iteration stay.
    """

    def __init__(self, run_dir: str | Path, *, csv: bool, resumed: int | None = None) -> None:
        self._path, self._writes = Path(run_dir) / EXPERTS_LOAD, csv
        kept = None if resumed is None else kept_metrics(self._path, resumed)
        self._file = None if kept is None else _CsvFile(self._path, kept)

    def write(self, iteration: int, load: Mapping[int, float]) -> None:
        if not load or not self._writes:
            return
        if self._file is None:
            self._file = _CsvFile(self._path, None)
        self._file.write(iteration, {f"layer_{layer}": value for layer, value in load.items()})

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _CsvFile:
    """A CSV file whose columns may grow: a row with new ones makes the file be written anew, older rows get
    empty cells. Columns stand in order of appearance, after `iteration`."""

    def __init__(self, path: Path, kept: KeptMetrics | None) -> None:
        self._path = path
        self._columns: list[str] = []
        self._replace(list(kept.columns) if kept else ["iteration"], kept.rows if kept else ())
        self._file = self._opened()

    def write(self, iteration: int, values: dict[str, float]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._widen(new)
        cells = {"iteration": str(iteration), **{name: repr(value) for name, value in values.items()}}
        with writing(self._path):
            _csv_writer(self._file).writerow([cells.get(name, "") for name in self._columns])
            self._file.flush()

    def sync(self) -> None:
        with writing(self._path):
            os.fsync(self._file.fileno())
            sync(self._path.parent)  # the name, where the file is new

    def close(self) -> None:
        with writing(self._path):
            self._file.close()

    def _opened(self) -> TextIO:
        with writing(self._path):
            return self._path.open("a", encoding="utf-8", newline="")

    def _widen(self, new: list[str]) -> None:
        self.close()
        try:
            with writing(self._path), self._path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
            self._replace([*self._columns, *new], rows)
        finally:
            self._file = self._opened()

    def _replace(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        """Put a file of these rows in place of the present one; a reader sees either, never half."""
        text = io.StringIO(newline="")
        writer = _csv_writer(text)
        writer.writerow(columns)
        writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)
        replace_file(self._path, [text.getvalue().encode()])
        self._columns = columns


class _TensorBoardFiles:
    """An event file, written in the calling thread: torch's own writer has a thread, which prints errors."""

    def __init__(self, directory: Path, first_step: int) -> None:
        # imported for those who asked for it
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Callable[..., Any] = Event
        self._path = directory / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with writing(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
            self._records = RecordWriter(self._file)
            self._add(file_version="brain.Event:2")
            # TensorBoard leaves out what earlier event files of the directory say from this step on
            self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))
            self._file.flush()

    def write(self, iteration: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        with writing(self._path):
            for name, value in values.items():
                self._add(step=iteration, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))
            self._file.flush()

    def _add(self, **event: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **event).SerializeToString())

    def sync(self) -> None:
        """Only metrics.csv is read back; curves may lack their last points after a power cut."""

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


_csv_writer = partial(csv.writer, lineterminator="\n")


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)
