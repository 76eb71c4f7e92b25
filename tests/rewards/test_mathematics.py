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
        ("\\boxed{5}, no: \\boxed{6}", "6", 1.0),
        ("\\boxed{5}, no: \\boxed{6}", "5", 0.0),
        ("$x=\\boxed{1}$, $y=\\boxed{2}$", "\\{1, 2\\}", 1.0),
        ("\\boxed{3}, no: \\boxed{1} and \\boxed{2}", "\\{1, 2\\}", 1.0),
        ("\\boxed{5}. Wait, that is wrong. The answer is $6$.", "6", 1.0),
        ("\\boxed{\\frac{1}{3}}, so the answer is about 0.33.", "1/3", 1.0),
        ("\\boxed{5} or \\boxed{", "5", 1.0),
        ("so 5 \\boxed{7", "5", 0.0),
        ("<think>\\boxed{5}</think>The answer is $6$.", "6", 1.0),
        ("\\boxed{\\$32,348}", "\\$32,\\!348", 1.0),
        ("0.0000001", 1e-7, 1.0),
        ("10000000000000000000000", 1e22, 1.0),
        ("4", ["5", "4"], 1.0),
        ("4", {"target": ["4", "four"]}, 1.0),
    ],
)
def test_formulas_are_equal_however_they_are_written(response: str, answer: object, expected: float) -> None:
    assert math_equal(["p"], [response], {"answer": [answer]}) == [expected]


def test_an_answer_that_is_no_formula_is_no_zero() -> None:
    for wrong in ("", True):
        with pytest.raises(ValueError, match=f"column 'answer': {wrong!r} is no formula"):
            math_equal(["p"], ["$5$"], {"answer": [wrong]})


def test_its_limits_say_nothing_at_each_row(caplog: pytest.LogCaptureFixture) -> None:
    math_equal(["p"] * 2, ["$5$"] * 2, {"answer": ["5", "6"]})
    assert caplog.records == []
