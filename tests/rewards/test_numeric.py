"""Which number a text ends in, and whether it is the answer's."""

from fractions import Fraction

import pytest

from hybridflow.rewards import numeric_match
from hybridflow.rewards.numeric import boxed, number_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She has 4 + 3 = 7 eggs.\n#### 7", "7"),
        ("#### 1,234.50", "1234.5"),
        ("#### 3\nor rather\n#### $5,000\n(dollars of 2020)", "5000"),
        ("####", None),
        ("#### none of 3\n4", "3"),
        ("so it is \\boxed{42}, not 43", "42"),
        ("\\boxed{1} or \\boxed{\\frac{3}{4}}", "3/4"),
        ("\\boxed{\\text{no number}} 5", None),
        ("\\boxed{7", "7"),
        ("the answer is 72.00.", "72"),
        ("about 50%", "50"),
        ("50\\% of \\$3", "3"),
        ("-3", "-3"),
        ("x = -3", "-3"),
        ("\u22123", "-3"),
        ("it is 7-5", "5"),
        ("pages 3-4", "4"),
        ("+8", "8"),
        ("3/4", "3/4"),
        ("-3 / 4", "-3/4"),
        ("3 1/2", "7/2"),
        ("1\\frac{3}{4}", "7/4"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("\\frac12", "1/2"),
        ("1/0", None),
        (".5", "1/2"),
        ("1.5e3", "1500"),
        ("2E-2", "1/50"),
        ("12,345,678", "12345678"),
        ("1{,}000", "1000"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("no number", None),
        ("", None),
        ("9" * 2000, None),
        ("\u0664\u0662", None),
    ],
)
def test_the_number_that_counts(text: str, expected: str | None) -> None:
    assert number_in(text) == (None if expected is None else Fraction(expected))


def test_braces_within_a_box_are_paired() -> None:
    assert boxed("a \\boxed{x^{2} + {3}} b") == "x^{2} + {3}"
    assert boxed("\\boxed{1} \\boxed{2") is None and boxed("none") is None


def test_equal_numbers_match_however_they_are_written() -> None:
    columns = {"answer": ["#### 1,000", 0.75, "0.1", 5, "42", "42"]}
    responses = ["it is 1000.0", "\\boxed{\\frac{3}{4}}", "1/10", "five", "#### 42", "#### 43"]
    assert numeric_match(["p"] * 6, responses, columns) == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert numeric_match(["p"], ["3"], {"solution": ["so \\boxed{3}"]}, answer="solution") == [1.0]


def test_an_answer_without_a_number_is_no_zero() -> None:
    with pytest.raises(ValueError, match="column 'answer': 'n/a' holds no number"):
        numeric_match(["p"], ["3"], {"answer": ["n/a"]})
