"""Which number a text ends in, and whether it is the answer's."""

import time
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
        ("\\boxed{7", None),
        ("so 5 \\boxed{7", None),
        ("\\boxed{5} once more: \\boxed{7", None),
        ("\\boxed{5} once more: \\boxed{", "5"),
        ("\\boxed{5}, no: \\boxed{6}", "6"),
        ("\\boxed{5}. Wait, that is wrong. The answer is 6.", "6"),
        ("\\boxed{1/3}, so the answer is about 0.33.", "1/3"),
        ("\\boxed{\\text{no answer: }5}", "5"),
        ("#### 5\nSorry, the answer is 6 eggs.", "6"),
        ("#### Step 1: count\nso \\boxed{7}", "7"),
        ("<think>\\boxed{5}</think>The answer is 6.", "6"),
        ("it may be 5</think>\n\n", "5"),
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


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("10\\sqrt{3}", None),
        ("2^{10}", None),
        ("x^2", None),
        ("x=5 or 7", None),
        ("x = 5, y = 7", None),
        ("5 \\text{ or } 7", None),
        ("(1, 2)", None),
        ("7 - 5", None),
        ("5x", None),
        ("5xy", None),
        ("5i", None),
        ("3\\pi", None),
        ("\\frac{\\sqrt{3}}{2}", None),
        ("\\frac{x}{2}", None),
        ("5!", None),
        ("\\pm 5", None),
        ("x > 5", None),
        ("x \\le 5", None),
        ("x != 5", None),
        ("101_2", None),
        ("3:2", None),
        ("12:30", None),
        ("sqrt(5)", None),
        ("|5|", None),
        ("5\\text{ cm}", "5"),
        ("5\\text{ m}^2", "5"),
        ("5\\ \\mathrm{m}^{2}", "5"),
        ("5 m/s^2", "5"),
        ("\\text{5}", "5"),
        ("\\text{5 cm}", "5"),
        ("\\textbf{5}", "5"),
        ("\\text{Answer: }5", "5"),
        ("\\$1,234.50", "1234.5"),
        ("5\\,000", "5000"),
        ("x = 5", "5"),
        ("x_1 = 5", "5"),
        ("f(1, 2) = 5", "5"),
        ("x^2 = 2 + 3 = 5", "5"),
        ("x \\approx 3.14", "3.14"),
        ("- 5", "-5"),
        ("x = -5", "-5"),
        ("-\\frac{1}{2}", "-1/2"),
        ("1\\frac{3}{4}", "7/4"),
        ("45^\\circ", "45"),
        ("45^{\\circ}\\text{C}", "45"),
        ("3.5 \\times 10^{4}", "35000"),
        ("2\\cdot 10^3", "2000"),
        ("50\\%", "50"),
        ("\\left(5\\right)", "5"),
        ("{5}", "5"),
        ("5 dollars.", "5"),
        ("5\\text{ dollars each}", "5"),
        ("€5", "5"),
    ],
)
def test_what_is_boxed_has_to_be_one_number(inside: str, expected: str | None) -> None:
    wanted = None if expected is None else Fraction(expected)
    assert number_in(f"after 3 or 4 steps \\boxed{{{inside}}}, not 9") == wanted
    assert number_in(f"after 3 or 4 steps\n#### {inside}\nnot 9") == wanted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 42</answer>", "42"),
        ("#### **42**", "42"),
        ("#### The answer is 42.", "42"),
        ("#### 42 apples and 3 pears", None),
        ("the answer is $10\\sqrt{3}$", None),
        ("so we get $5\\pi$", None),
        ("so we get $2^{10}$", None),
        ("an area of 5 m^2", "5"),
        ("an area of $5\\text{ cm}^2$", "5"),
        ("so $x = 5$", "5"),
        ("an angle of $45^\\circ$", "45"),
        ("\\textbf{5}", "5"),
        ("it is 5!", "5"),
    ],
)
def test_a_part_of_a_formula_is_no_answer(text: str, expected: str | None) -> None:
    assert number_in(text) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "a " * 100_000, "\\text{" * 30_000, "^" * 100_000, " " * 100_000 + "^"]
)
def test_a_hostile_line_takes_no_time(text: str) -> None:
    started = time.process_time()
    number_in(f"#### {text}5{text}")
    number_in(f"{text}5{text}")
    assert time.process_time() - started < 20.0


def test_braces_within_a_box_are_paired() -> None:
    assert boxed("a \\boxed{x^{2} + {3}} b") == "x^{2} + {3}"
    assert boxed("\\boxed{1} \\boxed{2") is None and boxed("none") is None


def test_equal_numbers_match_however_they_are_written() -> None:
    columns = {"answer": ["#### 1,000", 0.75, "0.1", 5, "42", "42"]}
    responses = ["it is 1000.0", "\\boxed{\\frac{3}{4}}", "1/10", "five", "#### 42", "#### 43"]
    assert numeric_match(["p"] * 6, responses, columns) == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert numeric_match(["p"], ["3"], {"solution": ["so \\boxed{3}"]}, answer="solution") == [1.0]


@pytest.mark.parametrize("given", [["5", "4"], ["four", "4"], {"target": [5, 4]}, {"value": "4", "aliases": []}, 4.0])
def test_of_several_answers_each_is_right(given: object) -> None:
    assert numeric_match(["p"] * 2, ["4", "3"], {"answer": [given] * 2}) == [1.0, 0.0]


def test_an_answer_without_a_number_is_no_zero() -> None:
    with pytest.raises(ValueError, match="column 'answer': 'n/a' holds no number"):
        numeric_match(["p"], ["3"], {"answer": ["n/a"]})
    with pytest.raises(ValueError, match="column 'answer': True holds no number"):
        numeric_match(["p"], ["1"], {"answer": [True]})
    with pytest.raises(ValueError, match=r"column 'answer': '10.*sqrt\{3\}' holds no number.*math_equal"):
        numeric_match(["p"], ["3"], {"answer": ["10\\sqrt{3}"]})
