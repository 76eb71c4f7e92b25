"""Scores of samples by bins, by hand."""

import math

from hybridflow.reporting.page import BINS, score_histogram
from hybridflow.reporting.runs import Samples


def rows(*scores: object, kind: str = "train") -> list[dict]:
    return [{"kind": kind, "prompt": "p", "response": "r", "score": score} for score in scores]


def test_the_first_and_the_last_half_of_the_iterations() -> None:
    samples = {1: rows(0.0, 0.1, None, math.nan, True), 2: rows(16.0) + rows(99.0, kind="heldout"), 5: rows(16, 8.0)}
    found = score_histogram(Samples(samples, 3))
    assert found["edges"] == [float(i) for i in range(BINS + 1)]
    assert found["first"] == [2] + [0] * 14 + [1]
    assert found["last"] == [0] * 8 + [1] + [0] * 6 + [1]
    assert found["iterations"] == [[1, 2], [5, 5]]


def test_one_value_is_one_bin_and_no_score_no_histogram() -> None:
    assert score_histogram(Samples({3: rows(1.0, 1.0)}, 1)) == {
        "edges": [1.0, 1.0],
        "first": [2],
        "last": [0],
        "iterations": [[3, 3]],
    }
    assert score_histogram(Samples({3: rows(None)}, 1)) is None
