"""What is read of a run directory, and what is told of one that is damaged or none."""

import math
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError, RunDirError
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.recording.run_dir import RunLayout
from hybridflow.reporting.runs import Samples, read_runs, read_samples, spaced
from tests.messages import like
from tests.reporting.run_dirs import HOSTILE, make_run


def read(*paths: Path):
    return read_runs(paths, sampled_iterations=100)


def test_a_whole_run(tmp_path: Path) -> None:
    [run] = read(make_run(tmp_path / "runs" / "math"))
    assert (run.label, run.iterations, run.notes) == ("math", (0, 1, 2, 3, 4, 5, 6), ())
    assert run.curves["eval/accuracy"] == [(0, 0.25), (3, 0.5), (6, 0.5)]
    assert run.curves["reward/score_mean"] == [(i, float(i)) for i in range(1, 7)]
    assert math.isnan(run.curves["actor/loss"][2][1])
    assert dict(run.config) == {
        "name": '"x"',
        "seed": "1",
        "actor.model": f'"{HOSTILE}"',
        "actor.optimizer.lr": "0.001",
        "stop": '["a", "b"]',
    }
    roles = {"actor": Layout(2, 2, 1, (0, 1, 2, 3)), "critic": Layout(1, 1, 2, (2, 3))}
    assert run.layout == RunLayout(4, roles, RolloutLayout(2, 1, ((0, 1), (2, 3))))
    assert run.samples.of == 6 and list(run.samples.by_iteration) == [1, 2, 3, 4, 5, 6]
    assert run.samples.by_iteration[2] == [
        {"iteration": 2, "prompt": "2 + 2 =", "response": f"{HOSTILE} 4", "score": 0.25, "parts": {"rule": 0.25}}
        | {"kind": "train", "columns": {"answer": "4"}}
    ]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / where) for where in ("a/math", "b/math", "b/code")]
    assert [run.label for run in read(*paths)] == ["a/math", "b/math", "code"]
    with pytest.raises(RunDirError, match="math: is given twice"):
        read(paths[0], paths[0])


def test_what_a_run_under_way_is_writing_is_left_alone(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", layout=False)
    for name in ("metrics.csv", "samples.jsonl"):
        with (path / name).open("a") as file:
            file.write('{"iteration": 7, "pro' if name == "samples.jsonl" else "7,0.")
    [run] = read(path)
    assert (run.notes, run.layout, run.iterations[-1], run.samples.of) == ((), None, 6, 6)


def test_damage_is_told_and_what_precedes_it_shown(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    with (path / "metrics.csv").open("a") as file:
        file.write("7,x\n8,y\n")
    with (path / "samples.jsonl").open("a") as file:
        file.write('{"iteration": 7}\n{"iteration": 8, "prompt": "", "response": ""}\n')
    [run] = read(path)
    assert run.notes == (
        "metrics.csv: line 9 is no row; it and the lines below it are left out",
        "samples.jsonl: line 7 is no sample; it and the lines below it are left out",
    )
    assert run.iterations[-1] == 6 and run.samples.of == 6
    (path / "samples.jsonl").unlink()
    [run] = read(path)
    assert run.samples == Samples({}, 0) and run.notes[1] == "samples.jsonl is not there: no samples are shown"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "metrics.csv",
            None,
            "metrics.csv: no such file; a run writes it with metrics.csv: true, and its directory has",
        ),
        ("metrics.csv", "iteration,a\n", "metrics.csv: no iteration is in it, so there is nothing to report"),
        ("metrics.csv", "step,a\n1,2\n", "metrics.csv: no iteration is in it, so there is nothing to report"),
        ("layout.json", "{", "layout.json: is damaged: Expecting property name"),
        ("layout.json", '{"world_size": 4, "roles": {}}', "layout.json: is damaged: 'rollout'"),
    ],
)
def test_a_run_that_cannot_be_read(file: str, text: str | None, message: str, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    (path / file).unlink()
    if text is not None:
        (path / file).write_text(text)
    with pytest.raises(RunDirError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}/{message}")


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    rule = "a run's is OUTPUT_DIR/NAME of its config, such as runs/quickstart"
    with pytest.raises(RunDirError) as error:
        read(tmp_path / "absent")
    assert str(error.value) == f"{tmp_path}/absent: no such directory; {rule}"
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError) as error:
        read(tmp_path / "file")
    assert str(error.value) == f"{tmp_path}/file: is no directory; {rule}"
    (make_run(tmp_path / "run") / "config.yaml").unlink()
    with pytest.raises(ConfigError) as wrong:
        read(tmp_path / "run")
    assert str(wrong.value) == like(f"{tmp_path}/run/config.yaml: cannot be read: No such file or directory")


def test_samples_of_some_iterations(tmp_path: Path) -> None:
    assert spaced([1, 2, 3, 5, 8, 9], 4) == [1, 3, 5, 9]
    assert spaced([1, 2], 4) == [1, 2]
    samples, notes = read_samples(make_run(tmp_path / "run", num_iterations=30) / "samples.jsonl", 3)
    assert (list(samples.by_iteration), samples.of, notes) == ([1, 15, 30], 30, [])
