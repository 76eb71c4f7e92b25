"""Files of a run that cannot be written: each is named, the others are written, and the iteration is not lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.errors import RecordError
from hybridflow.recording.recorder import WritingRecorder
from hybridflow.recording.run_dir import replace_file, writing
from hybridflow.recording.writers import MetricsWriter
from tests.recording.test_resume import config, done, opened

FULL = "cannot be written: No space left on device"


def full_metrics(recorder: WritingRecorder) -> None:
    recorder._metrics._sinks[0]._file = open("/dev/full", "a")


def full_events(recorder: WritingRecorder) -> None:
    recorder._metrics._sinks[1]._file = open("/dev/full", "wb")
    recorder._metrics._sinks[1]._records._writer = recorder._metrics._sinks[1]._file


def full_samples(recorder: WritingRecorder) -> None:
    recorder._samples._file = open("/dev/full", "a")


def batches_are_a_file(recorder: WritingRecorder) -> None:
    (recorder._config.run_dir / "batches").touch()


@pytest.mark.parametrize(
    ("spoil", "name", "why"),
    [
        (full_metrics, "metrics.csv", FULL),
        (full_events, "tensorboard/events.out", FULL),
        (full_samples, "samples.jsonl", FULL),
        (batches_are_a_file, "batches", "cannot be written: File exists"),
    ],
)
def test_what_cannot_be_written_is_the_failure_of_the_record(
    spoil: Callable[[WritingRecorder], None], name: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written = {"tensorboard": True, "dump_batches": True, "num_samples": 1}
    c = config(tmp_path)
    c = c.model_copy(update={"metrics": c.metrics.model_copy(update=written)})
    numbers = {"reward/score_mean": 0.5, "train/tokens_per_sec": 1.0}
    with opened(c) as recorder:
        recorder.iteration(done(1, numbers))
        assert recorder.failure is None
        (batch := c.run_dir / "batches" / "iteration_000001.safetensors").unlink()
        batch.parent.rmdir()
        spoil(recorder)
        recorder.iteration(done(2, numbers))
        assert recorder.failure is not None
        assert recorder.failure.startswith(f"{c.run_dir / name}") and recorder.failure.endswith(why)
        recorder.sync()
    said = capfd.readouterr()
    assert f"warning: {recorder.failure}" in said.out.replace("\n", "") and "Traceback" not in said.err + said.out
    for other, text in (("metrics.csv", "\n2,"), ("samples.jsonl", '"iteration": 2')):
        assert (text in (c.run_dir / other).read_text()) == (other != name)


def test_a_directory_that_cannot_be_opened_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    c = config(tmp_path)
    with opened(c):
        pass
    file = c.run_dir / "samples.jsonl"
    file.unlink()
    file.mkdir()
    with pytest.raises(RecordError, match=r"samples\.jsonl: cannot be written: Is a directory"), opened(c, resumed=0):
        raise AssertionError("it began")


def test_a_column_that_cannot_be_added_leaves_rows_that_fit_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsWriter(tmp_path, csv=True, tensorboard=False)
    metrics.write(1, {"a": 1.0})
    (tmp_path / "metrics.csv.tmp").mkdir()
    with pytest.raises(RecordError, match=r"metrics\.csv"):
        metrics.write(2, {"a": 2.0, "b": 3.0})
    (tmp_path / "metrics.csv.tmp").rmdir()
    metrics.write(3, {"a": 4.0, "c": 5.0})
    metrics.close()
    assert (tmp_path / "metrics.csv").read_text() == "iteration,a,c\n1,1.0,\n3,4.0,5.0\n"


def test_errors_name_the_file_also_where_the_system_does_not(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"^x: cannot be written: No space left on device$"), writing(Path("x")):
        with open("/dev/full", "w") as full:
            full.write("1")
    with pytest.raises(RecordError, match=f"^{tmp_path}/no/where.tmp: cannot be written: No such file or directory$"):
        replace_file(tmp_path / "no" / "where", [b""])
