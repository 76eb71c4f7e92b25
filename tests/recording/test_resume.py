"""A run that was interrupted leaves what it would have left: metrics.csv and samples byte for byte, curves, summary."""

import csv
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.batch import PromptBatch, RolloutBatch, response_mask
from hybridflow.config import ExperimentConfig
from hybridflow.recording.iteration import Iteration
from hybridflow.recording.recorder import Recorder, record_run
from hybridflow.recording.resume import cut_samples, kept_metrics, remove_batches
from hybridflow.recording.run_dir import dump_batch
from hybridflow.recording.writers import MetricsWriter, SampleWriter
from tests.recording.test_writers import scalars

# columns come with iterations 0 to 4; one name needs quotes
ROWS = [
    {"eval/accuracy": 0.25},
    {"reward/score_mean": -0.5, "train/tokens_per_sec": 1 / 3},
    {"reward/score_mean": 1e-30, "kl,coef": 0.1},
    {"train/lost_to_nonfinite": 1.0},
    {"reward/score_mean": float("nan"), "eval/accuracy": 0.5, "b": -0.0},
    {"reward/score_mean": 2.0, "b": 5e-324},
]
SAMPLES = [
    [],
    [
        {"prompt": "1+1=", "response": "2\n", "score": 1.0, "parts": {"exact": 0.5}},
        {"prompt": "é\u2028", "response": "\ud83d", "score": None, "parts": {}},
    ],
    [{"prompt": '"iteration": 9', "response": "", "score": -0.5, "parts": {}}],
]


def write(run_dir: Path, iterations: range, resumed: int | None = None) -> None:
    writer = MetricsWriter(run_dir, csv=True, tensorboard=False, resumed=resumed)
    for iteration in iterations:
        writer.write(iteration, ROWS[iteration])
    writer.close()


def whole(run_dir: Path, stop: int = len(ROWS)) -> bytes:
    """metrics.csv of a run that nothing interrupts."""
    write(run_dir, range(stop))
    return (run_dir / "metrics.csv").read_bytes()


def last_complete(cut: bytes) -> int | None:
    """The last iteration whose row, with the end of its line, is there."""
    lines = cut.split(b"\n")[1:-1]
    return len(lines) - 1 if lines else None


# ------------------------------------------------------------------------------------------------ metrics.csv


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("written", range(1, len(ROWS) + 1))
def test_a_run_cut_at_any_byte_goes_on_to_the_same_file(written: int, undisturbed: bytes, tmp_path: Path) -> None:
    """After any number of rows, cut to any length, from the last checkpoint that may be on the disk then."""
    before = whole(tmp_path / "before", written)
    file = tmp_path / "run" / "metrics.csv"
    file.parent.mkdir()
    for size in range(len(before) + 1):
        last = last_complete(before[:size])
        file.write_bytes(before[:size])
        write(tmp_path / "run", range(0 if last is None else last + 1, len(ROWS)), resumed=last or 0)
        assert file.read_bytes() == undisturbed, f"cut to {size} of {len(before)} bytes"


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("number", range(1, 7))  # the file is put in place when it is opened and by five rows
def test_a_run_that_ends_while_a_file_is_replaced_goes_on_to_the_same_file(
    number: int, call: str, undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = number, getattr(os, call)

    def ends(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, ends)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, range(len(ROWS)))
    file = tmp_path / "metrics.csv"
    assert (tmp_path / "metrics.csv.tmp").exists()
    last = last_complete(file.read_bytes()) if file.exists() else None
    assert last == (None, None, 0, 1, 2, 3)[number - 1]
    write(tmp_path, range(0 if last is None else last + 1, len(ROWS)), resumed=last or 0)
    assert file.read_bytes() == undisturbed and [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("garbage", [b"", b"\0" * 40, b"\0" * 40 + b"\n", b"6,\xff\n", b"6,1.0\n7,1.0,,,,,,,,\n"])
@pytest.mark.parametrize("resumed", range(len(ROWS)))
def test_a_run_goes_on_from_any_iteration(resumed: int, garbage: bytes, undisturbed: bytes, tmp_path: Path) -> None:
    """Rows after the checkpoint, and what a machine that lost its power may leave after them, are gone."""
    (tmp_path / "metrics.csv").write_bytes(undisturbed + garbage)
    write(tmp_path, range(resumed + 1, resumed + 1), resumed=resumed)
    assert (tmp_path / "metrics.csv").read_bytes() == whole(tmp_path / "until", resumed + 1)  # as it was then
    write(tmp_path, range(resumed + 1, len(ROWS)), resumed=resumed)
    assert (tmp_path / "metrics.csv").read_bytes() == undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "until"]


def test_kept_rows_are_read_as_numbers(undisturbed: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(undisturbed)
    kept = kept_metrics(tmp_path / "metrics.csv", 2)
    assert kept.columns == ("iteration", "eval/accuracy", "reward/score_mean", "train/tokens_per_sec", "kl,coef")
    assert kept.numbers() == [{"iteration": i, **ROWS[i]} for i in range(3)]
    assert kept.missing(4) == [3, 4]


@pytest.mark.parametrize("text", ["", "iteration", "step,a\n1,2.0\n", '"iteration,a\n1,2.0\n', "\xff\n"])
def test_a_file_without_a_header_of_ours_has_no_rows(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(text, encoding="latin-1")
    kept = kept_metrics(tmp_path / "metrics.csv", 9)
    assert (kept.columns, kept.rows) == (("iteration",), ())


def test_a_file_that_is_no_longer_written_is_cut_back_all_the_same(undisturbed: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(undisturbed)
    MetricsWriter(tmp_path, csv=False, tensorboard=False, resumed=1).close()
    assert (tmp_path / "metrics.csv").read_bytes() == whole(tmp_path / "until", 2)


# ------------------------------------------------------------------------------------------------ samples.jsonl


def write_samples(file: Path, iterations: range, resumed: int | None = None) -> bytes:
    writer = SampleWriter(file, resumed=resumed)
    for iteration in iterations:
        writer.write(iteration, [row | {"kind": "train", "columns": {}} for row in SAMPLES[iteration]])
    writer.close()
    return file.read_bytes()


def test_samples_cut_at_any_byte_go_on_to_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    undisturbed = write_samples(tmp_path / "undisturbed.jsonl", range(3))
    first = len(write_samples(tmp_path / "first.jsonl", range(2)))
    for size in range(len(undisturbed) + 1):
        resumed = 1 if size >= first else 0
        file.write_bytes(undisturbed[:size])
        assert write_samples(file, range(resumed + 1, 3), resumed) == undisturbed, size


def test_samples_end_at_the_first_line_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    good = b'{"iteration": 1, "prompt": ""}\n'
    for bad in (b"\0\0\n", b"[1]\n", b'{"iteration": "1"}\n', b'{"iteration": 1\n', b"\n", b"\xff\n"):
        file.write_bytes(good + bad + good)
        cut_samples(file, 5)
        assert file.read_bytes() == good, bad
    cut_samples(tmp_path / "absent.jsonl", 1)
    assert not (tmp_path / "absent.jsonl").exists()


# ------------------------------------------------------------------------------------------------ TensorBoard, batches


@pytest.mark.parametrize("torn", [0, 3])
def test_curves_go_on_without_gap_or_doubled_iteration(torn: int, tmp_path: Path) -> None:
    """Also where the last event before the end was cut short."""
    writer = MetricsWriter(tmp_path, csv=True, tensorboard=True)
    for iteration in range(1, 6):
        writer.write(iteration, {"actor/loss": float(iteration)})
    writer.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[: events.stat().st_size - torn])
    writer = MetricsWriter(tmp_path, csv=True, tensorboard=True, resumed=3)
    for iteration in range(4, 7):
        writer.write(iteration, {"actor/loss": 10.0 * iteration})
    writer.close()
    assert scalars(tmp_path) == {"actor/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0)]}


def test_batches_of_iterations_that_run_again_are_removed(tmp_path: Path) -> None:
    for name in ("iteration_000002", "iteration_000003", "iteration_1000000", "nonfinite_000003"):
        dump_batch(tmp_path, name, {"x": torch.ones(1)})
    batches = tmp_path / "batches"
    (batches / "iteration_000004.partial").write_bytes(b"half")
    removed = remove_batches(batches, 2)
    assert [file.name for file in removed] == ["iteration_000003.safetensors", "iteration_1000000.safetensors"]
    kept = ["iteration_000002.safetensors", "nonfinite_000003.safetensors"]
    assert sorted(file.name for file in batches.iterdir()) == kept
    assert remove_batches(tmp_path / "absent", 0) == []


# ------------------------------------------------------------------------------------------------ a whole record


def config(root: Path, **metrics: object) -> ExperimentConfig:
    role = {"model": "m", "optimizer": {"lr": 1e-3}}
    return ExperimentConfig.model_validate(
        {
            "name": "run",
            "output_dir": str(root),
            "num_iterations": 5,
            "data": {"train": "x", "prompts_per_iteration": 1, "max_prompt_length": 2},
            "sampling": {"max_response_length": 2},
            "actor": role,
            "critic": role,
            "reference": {"model": "m"},
            "reward": {"functions": [{"function": "a:b"}]},
            "metrics": {"tensorboard": False, "dump_batches": True, **metrics},
        }
    )


def done(iteration: int, metrics: dict) -> Iteration:
    lengths, prompt_lengths = torch.tensor([3]), torch.tensor([1])
    batch = RolloutBatch(
        input_ids=torch.tensor([iteration, 5, 6]),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        prompt_indices=torch.zeros(1, dtype=torch.int64),
        truncated=torch.zeros(1, dtype=torch.bool),
        response_mask=response_mask(lengths, prompt_lengths),
        rollout_log_probs=torch.zeros(3),
    )
    prompts = PromptBatch(torch.tensor([iteration]), torch.tensor([1]), (f"prompt {iteration}",), {})
    return Iteration(iteration, prompts, batch, dict(metrics))


def record(recorder: Recorder, iterations: range) -> None:
    for iteration in iterations:
        if iteration == 0:
            recorder.before_training({"eval/accuracy": 0.25})
            continue
        finished = done(iteration, {"reward/score_mean": iteration / 3, "train/tokens_per_sec": 100.0 * iteration})
        if iteration == 4:
            recorder.evaluated(finished, {"eval/accuracy": 0.5})
        recorder.iteration(finished)


def opened(c: ExperimentConfig, **how: object):
    return record_run(c, 5, rank=0, decode=str, **how)


def files(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.fixture
def interrupted(tmp_path: Path) -> ExperimentConfig:
    """A run that fell over in its fourth iteration."""
    c = config(tmp_path / "b")
    with pytest.raises(ZeroDivisionError), opened(c) as recorder:
        record(recorder, range(5))
        raise ZeroDivisionError
    with (c.run_dir / "metrics.csv").open("a") as file:
        file.write("5,0.")
    return c


def test_an_interrupted_run_leaves_what_one_that_was_not_does(
    interrupted: ExperimentConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with opened(config(tmp_path / "a")) as one:
        record(one, range(6))
    capsys.readouterr()
    with opened(interrupted, resumed=2) as two:
        record(two, range(3, 6))
    text = capsys.readouterr().out
    assert "removed 2 batches from iteration_000003.safetensors on, of iterations that are run again" in text
    found, expected = files(interrupted.run_dir), files(tmp_path / "a" / "run")
    assert found.pop("config.yaml") != expected.pop("config.yaml")  # output_dir
    assert found.pop("starts.jsonl").count(b"\n") == 2 * expected.pop("starts.jsonl").count(b"\n")
    assert found == expected
    assert load_file(interrupted.run_dir / "batches" / "iteration_000003.safetensors")["input_ids"][0] == 3
    one_told, two_told = one.summary(), two.summary()
    assert (two_told.accuracy_before, two_told.accuracy_after) == (0.25, 0.5)
    assert two_told.score_first == one_told.score_first == 1 / 3
    assert two_told.tokens_per_sec == one_told.tokens_per_sec == 300.0


def test_a_changed_config_takes_the_place_of_the_former_one(
    interrupted: ExperimentConfig, capsys: pytest.CaptureFixture
) -> None:
    path, former = interrupted.run_dir, interrupted.to_yaml()
    for number, num_samples in ((1, 2), (1, 2), (2, 3)):  # the same again keeps nothing
        changed = config(Path(interrupted.output_dir), num_samples=num_samples)
        with opened(changed, resumed=2):
            pass
        assert (path / "config.yaml").read_text() == changed.to_yaml()
        kept = sorted(file.name for file in path.glob("config.yaml.*"))
        assert kept == [f"config.yaml.{i}" for i in range(1, number + 1)]
    assert (path / "config.yaml.1").read_text() == former
    assert f"{path}/config.yaml has changed; the former one is now {path}/config.yaml.2" in capsys.readouterr().out


def test_a_removed_metrics_file_is_told_and_begun_anew(
    interrupted: ExperimentConfig, capsys: pytest.CaptureFixture
) -> None:
    file = interrupted.run_dir / "metrics.csv"
    file.unlink()
    with opened(interrupted, resumed=3) as recorder:
        record(recorder, range(4, 6))
    assert f"{file} is not there: a new one begins with iteration 4" in capsys.readouterr().out
    assert [row["iteration"] for row in csv.DictReader(file.open())] == ["4", "5"]
    assert recorder.summary().accuracy_before == 0.5  # what is known
    with opened(interrupted, resumed=5):
        pass
    assert f"{file} has no row of 3 of the iterations up to 5, the first is 1" in capsys.readouterr().out


def test_a_run_that_starts_anew_moves_the_earlier_one_away(
    interrupted: ExperimentConfig, capsys: pytest.CaptureFixture
) -> None:
    before = files(interrupted.run_dir)
    with opened(interrupted, forked=2):
        pass
    moved = interrupted.run_dir.with_name("run.1")
    assert files(moved) == before
    assert (interrupted.run_dir / "metrics.csv").read_text() == "iteration\n"
    assert f"{interrupted.run_dir} held an earlier run; it is now {moved}" in capsys.readouterr().out


def test_what_a_checkpoint_counts_on_is_synced_first(
    interrupted: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        synced.append((path.name, path.stat().st_size if path.is_file() else 0))

    with opened(interrupted, resumed=3) as recorder:
        record(recorder, range(4, 5))
        monkeypatch.setattr(os, "fsync", note)
        recorder.sync()
        rows = (interrupted.run_dir / "metrics.csv").read_bytes()
        lines = (interrupted.run_dir / "samples.jsonl").read_bytes()
    assert synced == [("metrics.csv", len(rows)), ("run", 0), ("samples.jsonl", len(lines)), ("run", 0)]
    assert rows.splitlines()[-1].startswith(b"4,")  # nothing waits in a buffer of this process
    assert json.loads(lines.splitlines()[-1])["iteration"] == 4


def test_files_that_a_user_takes_away_do_not_end_a_run(interrupted: ExperimentConfig) -> None:
    with opened(interrupted, resumed=3) as recorder:
        (interrupted.run_dir / "metrics.csv").unlink()
        (interrupted.run_dir / "samples.jsonl").unlink()
        record(recorder, range(4, 5))
        recorder.sync()
    with opened(interrupted, resumed=4) as recorder:
        record(recorder, range(5, 6))
    [row] = csv.DictReader((interrupted.run_dir / "metrics.csv").open())
    assert row["iteration"] == "5"
    [line] = (interrupted.run_dir / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["iteration"] == 5


def test_silent_ranks_write_nothing(interrupted: ExperimentConfig) -> None:
    before = files(interrupted.run_dir)
    with record_run(interrupted, 5, rank=1, decode=str, resumed=2) as recorder:
        recorder.sync()
        assert files(interrupted.run_dir) == before
