"""Tokens and hours so far, by hand."""

import pytest

from hybridflow.reporting.page import MOST, axes

SECONDS, RATE = "time/iteration_seconds", "train/tokens_per_sec"


def test_tokens_and_hours_add_up_with_saves() -> None:
    curves = {SECONDS: [(1, 1800.0), (2, 900.0), (3, 900.0)], RATE: [(1, 2.0), (2, 4.0), (3, 1.0)]}
    found = axes(curves | {"time/save_seconds": [(2, 900.0)]})
    assert found["tokens"] == {"x": [0, 1, 2, 3], "y": [0, 3600, 7200, 8100]}
    assert found["hours"] == {"x": [0, 1, 2, 3], "y": [0, 0.5, 1.0, 1.25]}
    assert axes({SECONDS: curves[SECONDS]}).keys() == {"hours"} and axes({RATE: curves[RATE]}) == {}


def test_a_long_run_keeps_so_many_points_and_the_end() -> None:
    found = axes({SECONDS: [(i, 3600.0) for i in range(1, 10_001)]})["hours"]
    assert len(found["x"]) <= MOST + 1 and (found["x"][-1], found["y"][-1]) == (10_000, 10_000)
    assert found["x"] == pytest.approx(found["y"])
