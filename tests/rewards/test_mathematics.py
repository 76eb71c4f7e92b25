"""Whether formulas are equal, by math-verify."""

import pytest

from hybridflow.rewards import math_equal


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+2", 0.0),
        ("The set is $\\{3, 1, 2\\}$.", "\\{1, 2, 3\\}", 1.0),
        ("$x = 5$", "5", 1.0),
        ("$\\sqrt{8}$", "$2\\sqrt{2}$", 1.0),
        ("$[0, 1)$", "[0, 1)", 1.0),
        ("$[0, 1]$", "[0, 1)", 0.0),
        ("nothing of the kind", "5", 0.0),
        ("$\\frac{", "5", 0.0),
        ("first $5$, no: \\boxed{6}", "5", 0.0),
    ],
)
def test_formulas_are_equal_however_they_are_written(response: str, answer: str, expected: float) -> None:
    assert math_equal(["p"], [response], {"answer": [answer]}) == [expected]


def test_an_answer_that_is_no_formula_is_no_zero() -> None:
    with pytest.raises(ValueError, match="column 'answer': '' is no formula"):
        math_equal(["p"], ["$5$"], {"answer": [""]})


def test_its_limits_say_nothing_at_each_row(caplog: pytest.LogCaptureFixture) -> None:
    math_equal(["p"] * 2, ["$5$"] * 2, {"answer": ["5", "6"]})
    assert caplog.records == []
