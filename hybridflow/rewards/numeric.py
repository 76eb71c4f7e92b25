"""`hybridflow.rewards:numeric_match`: whether the number that a response ends in is that of the row's answer.

Where a text has a `####` (as GSM8K's solutions), or else a `\\boxed{...}`, the last of these says where the number is,
and what stands there has to be one number (`rewards/one_number.py`): \\boxed{2\\sqrt{3}} is none. In any other text the
last number counts, unless that is a part of a formula. Numbers are compared as fractions: 1,234.50 is 1234.5, 3/4 is
\\frac{3}{4} and 0.75, $5 is 5 and 50% is 50.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hybridflow.rewards.one_number import last_number, one_number


def numeric_match(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, answer: str = "answer"
) -> list[float]:
    """1.0 where both numbers are equal, else 0.0. answer: the column. Errors: ValueError where it holds no number."""
    return [
        float(number_in(response) == _expected(expected, answer))
        for response, expected in zip(responses, columns[answer], strict=True)
    ]


def number_in(text: str) -> Fraction | None:
    """The one that the text ends in; None where there is none in the place that counts."""
    marked = _marked(text)
    return last_number(text) if marked is None else one_number(marked)


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with the braces in it paired; None where there is none that ends."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None


def _expected(value: Any, column: str) -> Fraction:
    number = number_in(str(value))
    if number is None:
        raise ValueError(
            f"column {column!r}: {value!r} holds no number, or a formula with one, which hybridflow.rewards:math_equal "
            f"compares"
        )
    return number


def _marked(text: str) -> str | None:
    """What stands in the place that says where the number is; None where there is no such place."""
    if "####" in text:
        lines: Sequence[str] = text.rpartition("####")[2].strip().splitlines()
        return lines[0] if lines else ""
    return boxed(text)
