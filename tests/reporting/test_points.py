"""Which points of a curve are drawn."""

import math

from hybridflow.reporting.page import points

NAN, INF = math.nan, math.inf


def test_a_short_curve_is_drawn_whole() -> None:
    curve = [(0, 0.25), (3, 1 / 3), (4, NAN), (5, -INF), (6, 1234567.0)]
    assert points(curve, 5) == {"per": 1, "x": [0, 3, 4, 5, 6], "y": [0.25, 0.333333, None, None, 1.23457e6]}
    assert points([], 5) == {"per": 1, "x": [], "y": []}


def test_a_long_curve_is_drawn_as_means_and_ranges() -> None:
    """Seven values for three points: stretches of three, three and one."""
    curve = [(1, 1.0), (2, 2.0), (3, 6.0), (5, NAN), (6, 4.0), (7, INF), (9, 5.0)]
    assert points(curve, 3) == {
        "per": 3,
        "x": [1, 5, 9],
        "end": [3, 7, 9],
        "y": [3.0, 4.0, 5.0],
        "low": [1.0, 4.0, 5.0],
        "high": [6.0, 4.0, 5.0],
        "lost": [0, 2, 0],
    }


def test_a_stretch_without_a_finite_value_is_a_gap() -> None:
    found = points([(1, NAN), (2, NAN), (3, 1.0), (4, 2.0)], 2)
    assert (found["y"], found["low"], found["high"]) == ([None, 1.5], [None, 1.0], [None, 2.0])


def test_no_spike_is_lost_and_no_number_overflows() -> None:
    curve = [(i, 1e308 if i == 777 else 1.5e308 if i == 778 else 0.0) for i in range(10_000)]
    found = points(curve)
    assert (len(found["x"]), found["per"], max(found["high"])) == (400, 25, 1.5e308)
    assert max(found["y"]) == 1e307  # (1e308 + 1.5e308) / 25
