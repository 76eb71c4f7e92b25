"""Phase times, metrics.csv whose columns grow, TensorBoard files, samples.jsonl."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.errors import RecordError
from hybridflow.parallel import host_memory
from hybridflow.recording import measure
from hybridflow.recording.measure import Stopwatch, peak_rss_mb
from hybridflow.recording.writers import ExpertsLoadWriter, MetricsWriter, SampleWriter

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------ stopwatch


class Clock:
    """Stands for time.perf_counter; `events` says in which order time was read and the device waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[str] = []

    def read(self) -> float:
        self.events.append("read")
        return self.now

    def synchronize(self) -> None:
        self.events.append("synchronize")
        self.now += 0.25  # what was queued on the device


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", clock.read)
    return clock


def test_phases_accumulate_until_reset(clock: Clock) -> None:
    watch = Stopwatch()
    for seconds in (1.0, 2.0):
        with watch.phase("rollout"):
            clock.now += seconds
        with watch.phase("update"):
            clock.now += 4.0
    assert watch.seconds == {"rollout": 3.0, "update": 8.0}
    kept = watch.seconds
    watch.reset()
    assert watch.seconds == {}
    assert kept == {"rollout": 3.0, "update": 8.0}


def test_nested_phases_each_count_their_whole_block(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.phase("iteration"):
        clock.now += 1.0
        with watch.phase("rollout"):
            clock.now += 2.0
    assert watch.seconds == {"rollout": 2.0, "iteration": 3.0}


def test_work_queued_on_a_device_counts_for_the_phase_that_queued_it(clock: Clock) -> None:
    watch = Stopwatch(clock.synchronize)
    with watch.phase("rollout"):
        clock.now += 1.0
    assert clock.events == ["synchronize", "read", "synchronize", "read"]
    assert watch.seconds == {"rollout": 1.25}


def test_an_exception_leaves_a_phase_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), Stopwatch().phase("rollout"):
        raise ZeroDivisionError


# ------------------------------------------------------------------------------------------------ metrics.csv


def csv_text(run_dir: Path) -> str:
    return (run_dir / "metrics.csv").read_text()


def csv_writer(run_dir: Path) -> MetricsWriter:
    return MetricsWriter(run_dir, csv=True, tensorboard=False)


def test_columns_grow_and_older_rows_get_empty_cells(tmp_path: Path) -> None:
    writer = csv_writer(tmp_path)
    assert csv_text(tmp_path) == "iteration\n"
    writer.write(0, {"eval/accuracy": 0.25})
    writer.write(1, {"reward/score_mean": 0.5, "actor/loss": -0.125})
    writer.write(2, {"actor/loss": 2, "reward/score_mean": 1.0, "eval/accuracy": 0.75})
    writer.write(3, {"actor/loss": 1.0, "kl/coef": 0.1})
    writer.close()
    assert csv_text(tmp_path) == (
        "iteration,eval/accuracy,reward/score_mean,actor/loss,kl/coef\n"
        "0,0.25,,,\n"
        "1,,0.5,-0.125,\n"
        "2,0.75,1.0,2.0,\n"
        "3,,,1.0,0.1\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]  # no temporary file is left


def test_every_row_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    writer = csv_writer(tmp_path)
    for iteration in range(1, 4):
        writer.write(iteration, {"actor/loss": iteration / 2})
        assert csv_text(tmp_path).splitlines()[-1] == f"{iteration},{iteration / 2}"
    writer.close()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, 123456789012.0, -0.0, math.pi, 5e-324])
def test_floats_are_written_to_the_last_bit(tmp_path: Path, value: float) -> None:
    writer = csv_writer(tmp_path)
    writer.write(1, {"x": value})
    writer.close()
    (row,) = csv.DictReader(csv_text(tmp_path).splitlines())
    assert float(row["x"]) == value
    assert math.copysign(1, float(row["x"])) == math.copysign(1, value)


def test_tensors_integers_nan_and_infinity_are_written(tmp_path: Path) -> None:
    writer = csv_writer(tmp_path)
    values = {
        "a": torch.tensor(0.5),
        "b": torch.tensor([3]),
        "c": torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True),
        "d": 7,
        "e": float("nan"),
        "f": torch.tensor(float("-inf")),
    }
    writer.write(1, values)
    writer.close()
    assert csv_text(tmp_path) == "iteration,a,b,c,d,e,f\n1,0.5,3.0,1.5,7.0,nan,-inf\n"


def test_equal_runs_give_equal_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        writer = csv_writer(tmp_path / name)
        generator = torch.Generator().manual_seed(0)
        for iteration in range(5):
            extra = {"eval/accuracy": 0.1 * iteration} if iteration % 2 else {}
            writer.write(iteration, {"actor/loss": torch.rand((), generator=generator), **extra})
        writer.close()
    assert csv_text(tmp_path / "one") == csv_text(tmp_path / "two")


def test_opening_an_existing_run_starts_a_new_file(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        writer = csv_writer(tmp_path)
        writer.write(1, {"actor/loss": loss, f"only/{loss}": 0.0})
        writer.close()
    assert csv_text(tmp_path) == "iteration,actor/loss,only/2.0\n1,2.0,0.0\n"


def test_the_load_of_experts_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Which a dense model does not have, and which a resumed run cuts back."""
    file, dense = tmp_path / "experts_load.csv", ExpertsLoadWriter(tmp_path, csv=True)
    dense.write(1, {})
    dense.sync()
    dense.close()
    assert not file.exists()
    for resumed, writes in ((None, True), (1, True), (1, False)):
        writer = ExpertsLoadWriter(tmp_path, csv=writes, resumed=resumed)
        for iteration in (1, 2) if resumed is None else (2, 3):
            writer.write(iteration, {1: 1.5 * iteration, 3: 2.0})
        writer.sync()
        writer.close()
        rows = ["1,1.5,2.0"] + (["2,3.0,2.0"] if writes else []) + (["3,4.5,2.0"] if writes and resumed else [])
        assert file.read_text().splitlines() == ["iteration,layer_1,layer_3", *rows]


def test_names_with_commas_survive(tmp_path: Path) -> None:
    writer = csv_writer(tmp_path)
    writer.write(1, {'a,"b"': 1.0})
    writer.write(2, {"c": 2.0})
    writer.close()
    rows = list(csv.DictReader(csv_text(tmp_path).splitlines()))
    assert rows[0] == {"iteration": "1", 'a,"b"': "1.0", "c": ""}


def test_a_header_that_cannot_be_put_in_place_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = csv_writer(tmp_path)
    writer.write(1, {"a": 1.0})
    before = csv_text(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match=r"metrics\.csv: cannot be written: no space"):
        writer.write(2, {"b": 1.0})
    assert csv_text(tmp_path) == before == "iteration,a\n1,1.0\n"


# ------------------------------------------------------------------------------------------------ TensorBoard


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", csv=False, tensorboard=True)
    writer.write(0, {"eval/accuracy": 0.25})
    writer.write(1, {"actor/loss": torch.tensor(-0.5), "eval/accuracy": 0.5})
    # before close: events are on disk when write returns
    expected = {"eval/accuracy": [(0, 0.25), (1, 0.5)], "actor/loss": [(1, -0.5)]}
    assert scalars(tmp_path / "run") == expected
    writer.close()
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_tensorboard_hides_an_earlier_run_in_the_same_directory(tmp_path: Path) -> None:
    for loss, num_iterations in ((1.0, 4), (2.0, 2)):
        writer = MetricsWriter(tmp_path, csv=True, tensorboard=True)
        for iteration in range(1, num_iterations + 1):
            writer.write(iteration, {"actor/loss": loss})
        writer.close()
    assert scalars(tmp_path) == {"actor/loss": [(1, 2.0), (2, 2.0)]}


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", csv=False, tensorboard=False)
    writer.write(1, {"a": 1.0})
    writer.close()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.thorough
def test_tensorboard_is_imported_only_when_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys; from hybridflow.recording.writers import MetricsWriter\n"
        f"MetricsWriter({str(tmp_path)!r}, csv=True, tensorboard=False).close()\n"
        "assert 'tensorboard' not in sys.modules"
    )
    run_python(code)


# ------------------------------------------------------------------------------------------------ samples, memory


def test_samples_are_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "run" / "samples.jsonl"
    writer = SampleWriter(path)
    parts, rest = {"exact": 1.0, "format/brief": 0.25}, {"kind": "train", "columns": {"answer": "4"}}
    writer.write(1, [{"score": torch.tensor(0.5), "response": "4\n", "prompt": "2+2=", "parts": parts, **rest}])
    line = '{"iteration": 1, "kind": "train", "prompt": "2+2=", "response": "4\\n", "score": 0.5, "parts": '
    assert path.read_text() == line + '{"exact": 1.0, "format/brief": 0.25}, "columns": {"answer": "4"}}\n'
    rows = [{"prompt": "é", "response": "\ud83d", "score": 1}, {"prompt": "", "response": "", "score": 0}]
    none = {"kind": "heldout", "parts": {}, "columns": {}}
    writer.write(2, [row | none for row in rows])
    writer.write(3, [])
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["iteration"] for sample in samples] == [1, 2, 2]
    assert samples[1] == none | {"iteration": 2, "prompt": "é", "response": "\ud83d", "score": 1.0}
    writer.close()


def test_opening_existing_samples_starts_a_new_file(tmp_path: Path) -> None:
    for score in (1.0, 2.0):
        writer = SampleWriter(tmp_path / "samples.jsonl")
        row = {"kind": "train", "prompt": "p", "response": "r", "score": score, "parts": {}, "columns": {}}
        writer.write(1, [row])
        writer.close()
    (sample,) = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert sample["score"] == 2.0


@pytest.mark.slow
def test_peak_memory_is_in_mb_and_keeps_the_peak() -> None:
    """In a process of its own: how large this one has been depends on the tests before."""
    code = (
        "from hybridflow.recording.measure import peak_rss_mb\n"
        "before = peak_rss_mb()\n"
        "held = b'x' * (int(before + 200) * 2**20)\n"
        "during = peak_rss_mb()\n"
        "del held\n"
        "print(before, during, peak_rss_mb())"
    )
    before, during, after = map(float, run_python(code).split())
    assert 50 < before < 10_000  # torch alone takes more than 50 MB
    assert during > before + 195
    assert after == pytest.approx(during, abs=5)  # the kernel counts in batches of pages


def test_peak_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = peak_rss_mb()

    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(host_memory.Path, "read_text", absent)
    assert peak_rss_mb() == pytest.approx(expected, rel=0.2)
