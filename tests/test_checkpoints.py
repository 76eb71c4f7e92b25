"""`python -m hybridflow.checkpoints`: what it lists, what it finds damaged, and how one goes on from there."""

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hybridflow.checkpoint.listing import look
from hybridflow.checkpoint.store import MANIFEST, STATE, begin, point_to, publish, read_manifest
from hybridflow.cli.checkpoints import main
from tests.launch import ROOT
from tests.messages import like

METRICS = {"reward/score_mean": 0.5, "kl/reference_mean": 0.0123, "train/loss": 7.25}
WEIGHTS = bytes(range(256)) * 40  # 10,240 bytes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory that nothing is in yet, below the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path("runs/math")


def save(
    run: Path, iteration: int, *, metrics: dict[str, float] | None = None, model: str = "actor", **changes: Any
) -> Path:
    """A checkpoint of that iteration, written at noon of that day of January."""
    root = run / "checkpoints"
    partial = begin(root, iteration, [model])
    config = {"name": "math", "output_dir": "runs", "checkpoint": {"load": "auto"}}
    tree = {
        "format": 1,
        "run": {"iteration": iteration},
        "config": config,
        "metrics": METRICS if metrics is None else metrics,
        "forked_from": None,
    }
    (partial / STATE).write_text(json.dumps(tree | changes))
    (partial / "config.yaml").write_text("name: math\n")
    (partial / model / "__0_0.distcp").write_bytes(WEIGHTS)
    step = publish(root, iteration, partial, {})
    noon = datetime(2026, 1, iteration, 12).timestamp()
    os.utime(step / MANIFEST, (noon, noon))
    return step


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """(status, the cells of the table by its first, the lines below it)."""
    monkeypatch.setattr("hybridflow.cli.checkpoints.as_typed", lambda: "hybridflow")

    def run_it(*arguments: object) -> tuple[int, dict[str, list[str]], list[str]]:
        status = main([*map(str, arguments)])
        out, error = capsys.readouterr()
        assert error == ""
        lines = out.splitlines()
        end = next(i for i, line in enumerate(lines) if line.startswith("└"))
        header, rows = (
            [[cell.strip() for cell in line.split(border)[1:-1]] for line in lines[:end] if line.startswith(border)]
            for border in "┃│"
        )
        named = ["".join(parts) for parts in zip(*header, strict=True)]
        return status, {row[0]: row[1:] for row in (named, *rows)}, lines[end + 1 :]

    return run_it


def test_every_checkpoint_has_a_row(run: Path, shown) -> None:
    save(run, 2)
    step = save(run, 10, metrics={"reward/score_mean": 0.75})
    size = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
    for directory in (run, run / "checkpoints"):
        status, rows, lines = shown(directory)
        assert status == 0
        assert rows["iteration"] == ["size", "written", "reward/score_mean", "kl/reference_mean", "state"]
        assert rows["2"][1:] == ["2026-01-02 12:00", "0.5", "0.0123", "complete"]
        assert rows["10"] == [f"{size / 1000:.1f} kB", "2026-01-10 12:00", "0.75", "-", "complete, latest"]
        assert list(rows) == ["iteration", "2", "10"]
        train = f"hybridflow train {step}/config.yaml --nproc N"
        assert lines == [
            "",
            f"resume from 10 with the command that began the run, or: {train}",
            f"fork 10: {train} checkpoint.load={step} name=NEW",
            like(f"convert 10: hybridflow convert megatron-to-hf {step}/actor OUT"),
        ]


def test_one_checkpoint_is_shown_alone(run: Path, shown) -> None:
    first, _ = save(run, 2), save(run, 3)
    status, rows, lines = shown(first)
    assert (status, rows["2"][-1], len(rows)) == (0, "complete", 2)
    assert [line.partition(":")[0] for line in lines if line] == ["fork 2", "convert 2"]  # the run goes on from 3
    moved = first.rename(run.parent / "the best")
    status, rows, lines = shown(moved)
    assert (status, rows["2"][-1]) == (0, "complete")
    assert lines[-1] == like("convert 2: hybridflow convert megatron-to-hf 'runs/the best/actor' OUT")


def test_a_reward_models_checkpoint_is_converted_from_the_directory_that_it_has(run: Path, shown) -> None:
    step = save(run, 2, model="reward_model")
    _, _, lines = shown(run)
    assert lines[-1] == f"convert 2: hybridflow convert megatron-to-hf {step}/reward_model OUT"
    assert (step / "reward_model").is_dir() and not (step / "actor").exists()


def test_a_run_that_was_moved_is_gone_on_from_where_it_is(run: Path, shown) -> None:
    config = {"name": "math", "output_dir": "runs", "checkpoint": {"load": "none"}}
    save(run, 2, config=config)
    moved = run.rename("elsewhere")
    _, _, lines = shown(moved)
    assert lines[1].endswith(f"/config.yaml --nproc N output_dir={Path.cwd()} name=elsewhere checkpoint.load=auto")


def test_chosen_metrics_take_the_place_of_the_usual(run: Path, shown) -> None:
    save(run, 2)
    _, rows, lines = shown(run, "--metric", "train/loss", "--metric", "eval/accuracy")
    assert rows["iteration"] == ["size", "written", "train/loss", "eval/accuracy", "state"]
    assert rows["2"][2:4] == ["7.25", "-"]
    assert lines[0] == (
        like("no checkpoint has the metric eval/accuracy; there are: kl/reference_mean, reward/score_mean, train/loss")
    )


def test_a_file_of_another_size_is_found_without_reading(run: Path, shown) -> None:
    good, bad = save(run, 2), save(run, 3)
    file = bad / "actor" / "__0_0.distcp"
    file.write_bytes(WEIGHTS[:-1])
    (bad / "config.yaml").unlink()
    status, rows, lines = shown(run)
    assert (status, rows["2"][-1], rows["3"][-1]) == (1, "complete", "damaged, latest")
    assert lines[:2] == [
        f"{file}: has 10239 bytes, was written with 10240",
        f"{bad}/config.yaml: cannot be read: No such file or directory",
    ]
    assert lines[3].startswith("resume from 2 with") and f" {good}/config.yaml" in lines[3]


def test_a_flipped_bit_is_found_by_reading_every_byte(run: Path, shown) -> None:
    save(run, 2)
    file = save(run, 3) / "actor" / "__0_0.distcp"
    file.write_bytes(WEIGHTS[:5000] + bytes([WEIGHTS[5000] ^ 1]) + WEIGHTS[5001:])
    assert shown(run)[0] == 0
    status, rows, lines = shown(run, "--verify")
    assert (status, rows["2"][-1], rows["3"][-1]) == (1, "verified", "damaged, latest")
    assert re.fullmatch(rf"{file}: is damaged: its CRC-32 is \w{{8}}, manifest.json says \w{{8}}", lines[0])
    assert lines[1] == ""


def test_every_byte_that_is_read_is_told(run: Path) -> None:
    step, told = save(run, 2), list[int]()
    look(step, thorough=True, read=told.append)
    assert sum(told) == read_manifest(step).num_bytes
    assert WEIGHTS in [(step / name).read_bytes() for name in read_manifest(step).files]


@pytest.mark.parametrize(
    ("name", "content", "state", "problem"),
    [
        (MANIFEST, None, "incomplete", "cannot be read: No such file or directory"),
        (MANIFEST, "{", "damaged", "is damaged: "),
        (STATE, "{", "damaged", "has 1 bytes, was written with "),
    ],
)
def test_a_damaged_description_is_one_line(
    run: Path, shown, name: str, content: str | None, state: str, problem: str
) -> None:
    step = save(run, 3)
    file = step / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    status, rows, lines = shown(run)
    assert (status, rows["3"][-1], len(lines)) == (1, f"{state}, latest", 1)
    assert lines[0].startswith(f"{file}: {problem}")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": 2}, "format = 2 is not supported, must be 1"),
        ({"config": {"name": "math"}}, "is not of this version: KeyError: 'output_dir'"),
    ],
)
def test_a_state_of_another_version_is_a_problem(run: Path, shown, changes: dict, problem: str) -> None:
    step = save(run, 3, **changes)
    status, rows, lines = shown(run)
    assert (status, rows["3"][-1], lines) == (1, "damaged, latest", [f"{step}/state.json: {problem}"])


def test_what_is_left_of_a_save_and_where_a_run_began_are_told(run: Path, shown) -> None:
    for iteration in (2, 3):
        save(run, iteration, forked_from="/runs/other")
    save(run, 4)
    left = run / "checkpoints" / ".step_000005.partial"
    (left / "actor").mkdir(parents=True)
    (left / "actor" / "__0_0.distcp").write_bytes(WEIGHTS)
    point_to(run / "checkpoints", "step_000001")
    status, rows, lines = shown(run)
    assert (status, [row[-1] for row in rows.values()]) == (0, ["state", *3 * ["complete"]])
    assert lines[:3] == [
        like(f"{left}: 10.2 kB, of a save that is under way or did not end; the next save removes it"),
        like("latest names step_000001, which is no checkpoint; a resume does not need the file latest"),
        "forked from /runs/other: 2, 3",
    ]


def test_a_directory_without_checkpoints_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = begin(run / "checkpoints", 3, ["actor"])
    for directory, problems in (
        ("absent", ["absent: no such directory"]),
        (run, [f"{run}/checkpoints: holds no checkpoint", f"{left}: is left of a save that did not end"]),
    ):
        assert main([str(directory)]) == 1
        out, error = capsys.readouterr()
        assert (out, error.splitlines()) == ("", [f"hybridflow.checkpoints: error: {line}" for line in problems])


def test_it_starts_without_torch(run: Path) -> None:
    step = save(run, 2)
    code = (
        "import sys; from hybridflow.checkpoints import main; status = main(sys.argv[1:]);"
        "loaded = {'torch', 'megatron', 'pydantic', 'numpy'} & set(sys.modules); assert not loaded, loaded;"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", code, str(step.resolve()), "--verify"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified" in done.stdout
