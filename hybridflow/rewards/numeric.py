"""`hybridflow.rewards:numeric_match`: whether the number that a response ends in is that of the row's answer.

Where a text has a `####` (as GSM8K's solutions) or a `\\boxed{...}`, the last of these says where the number is, and
what stands there has to be one number (`rewards/one_number.py`): \\boxed{2\\sqrt{3}} is none. Words such as "No, the
answer is 5" behind that take it back. In any other text the last number counts, unless that is a part of a formula.
Thoughts that end do not count. Numbers are compared as fractions: 1,234.50 is 1234.5, 3/4 is \\frac{3}{4} and 0.75, $5
is 5 and 50% is 50.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from hybridflow.rewards.expected import alternatives, plain
from hybridflow.rewards.one_number import last_number, one_number
from hybridflow.rollout.thinking import behind_thoughts

TAKES_BACK = re.compile(
    r"\b(?:wait|actually|correct(?:ion|ed)|sorry|mistake|wrong|instead|rather|oops|no)\b", re.IGNORECASE
)
BRACE = re.compile(r"\\boxed\{|[{}]")
ANSWER = re.compile(r"\banswer\s*(?:is|:|=)\s*([^\n]*?)(?=[.!?](?:\s|\Z)|\n|\Z)", re.IGNORECASE)


def numeric_match(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, answer: str = "answer"
) -> list[float]:
    """1.0 where both numbers are equal, else 0.0. answer: the column; of several answers each is right.

    Errors: ValueError where it holds no number.
    """
    return [
        float(number_in(response) in numbers(expected, answer))
        for response, expected in zip(responses, columns[answer], strict=True)
    ]


def number_in(text: str) -> Fraction | None:
    """The one that the text ends in; None where there is none in the place that counts."""
    text = said_at_last(text)
    marked = _marked(text)
    return last_number(text) if marked is None else one_number(marked)


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with the braces in it paired; None where there is none that ends."""
    start = text.rfind("\\boxed{")
    end = boxes(text[start:]).get(0) if start >= 0 else None
    return None if end is None else text[start:][len("\\boxed{") : end - 1]


def boxes(text: str) -> dict[int, int]:
    """Where each box that ends begins and ends."""
    found, opened = dict[int, int](), list[re.Match[str]]()
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened and len((first := opened.pop())[0]) > 1:
            found[first.start()] = brace.end()
    return found


def numbers(value: Any, column: str) -> set[Fraction]:
    """The right ones of a row. Errors: ValueError naming the column and the value where there is none."""
    given = [one for one in alternatives(value, column) if not isinstance(one, bool)]
    found = {number for one in given if (number := number_in(plain(one))) is not None}
    if not found:
        raise ValueError(
            f"column {column!r}: {value!r} holds no number, or a formula with one, which hybridflow.rewards:math_equal "
            f"compares"
        )
    return found


def said_at_last(text: str) -> str:
    """Behind the thoughts, where something is said there; without a box at the end that has nothing in it."""
    said = (behind_thoughts(text) or text).rstrip()
    said = said if said else text
    while said.endswith("\\boxed{"):
        said = said[: -len("\\boxed{")].rstrip()
    return said


def taken_back(text: str) -> str | None:
    """The answer in words such as "Wait, that is wrong. The answer is 5."; None where there is none."""
    word = TAKES_BACK.search(text)
    said = [] if word is None else [found[1] for found in ANSWER.finditer(text, word.end())]
    return next((each for each in reversed(said) if one_number(each) is not None), None)


def _marked(text: str) -> str | None:
    """What stands in the last place that says where the number is; None where there is no such place."""
    line, box = text.rfind("####"), text.rfind("\\boxed{")
    if max(line, box) < 0:
        return None
    if box > line:
        marked = boxed(text) or ""  # one that does not end was cut within a number
    else:
        lines: Sequence[str] = text[line + len("####") :].strip().splitlines()
        marked = lines[0] if lines else ""
    return taken_back(text[max(line, box) + len(marked) :]) or marked
