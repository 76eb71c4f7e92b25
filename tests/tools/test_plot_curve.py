"""Learning curves as SVG: where points land, and what a missing metric says."""

import re
from pathlib import Path

import pytest

from hybridflow.cli.plot_curve import draw, main, read_curve

CSV = "iteration,reward/score_mean,eval/accuracy\n0,,0.25\n1,1.5,\n2,2.5,0.75\n"


def run_directory(path: Path) -> Path:
    path.mkdir()
    (path / "metrics.csv").write_text(CSV)
    return path


def test_only_measured_iterations_are_points(tmp_path):
    run = run_directory(tmp_path / "run")
    assert read_curve(run / "metrics.csv", "eval/accuracy") == [(0.0, 0.25), (2.0, 0.75)]
    assert read_curve(run / "metrics.csv", "reward/score_mean") == [(1.0, 1.5), (2.0, 2.5)]


def test_a_curve_spans_the_picture(tmp_path, capsys):
    run, target = run_directory(tmp_path / "run"), tmp_path / "new" / "curve.svg"
    assert main([str(target), str(run)]) == 0
    text = target.read_text()
    (points,) = re.findall(r'polyline points="([^"]+)"', text)
    # x from 56 to 620; accuracy 0 at y = 316, 1 at y = 36
    assert points == "56.0,246.0 620.0,106.0"
    assert "run: 0.25 to 0.75" in text
    assert capsys.readouterr().out == f"{target}: eval/accuracy of run; open it in a browser\n"


def test_a_missing_metric_is_an_error_that_names_it(tmp_path, capsys):
    run, target = run_directory(tmp_path / "run"), tmp_path / "curve.svg"
    assert main([str(target), str(run), "--metric", "actor/loss"]) == 1
    assert "metrics.csv: no curve of actor/loss" in capsys.readouterr().err
    assert not target.exists()


def test_many_names_stand_beside_the_curves(tmp_path):
    runs, target = [run_directory(tmp_path / f"run_{i}") for i in range(7)], tmp_path / "curve.svg"
    assert main([str(target), *map(str, runs)]) == 0
    text = target.read_text()
    assert 'viewBox="0 0 860 360"' in text
    assert [float(x) for x in re.findall(r'<text x="(\d+)" y="\d+" fill="#', text)] == [636.0] * 7


@pytest.mark.parametrize(
    ("curves", "places"),
    [
        ({"rises": [(0, 0.0), (1, 1.0)]}, ['x="612" y="308" text-anchor="end"']),  # at the bottom right
        ({"falls": [(0, 1.0), (1, 0.0)]}, ['x="64" y="308"']),
        ({"up": [(0, 0.0), (1, 1.0)], "down": [(0, 0.0), (1, 0.0)]}, ['x="64" y="52"', 'x="64" y="68"']),
        ({"up": [(0, 0.0), (1, 1.0)], "down": [(0, 1.0), (1, 0.0)]}, ['x="636" y="44"', 'x="636" y="64"']),
    ],
)
def test_no_name_lies_on_a_curve(curves, places):
    names = re.findall(r'<text (x="\d+" y="\d+"(?: text-anchor="end")?) fill="#', draw(curves, "eval/accuracy"))
    assert names == places
