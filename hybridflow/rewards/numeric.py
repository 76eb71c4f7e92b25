"""`hybridflow.rewards:numeric_match`: whether the number that a response ends in is that of the row's answer.

Where a text has a `####` (as GSM8K's solutions), or else a `\\boxed{...}`, the last of these says where the number is;
in any other text its last number counts. Numbers are compared as fractions: 1,234.50 is 1234.5, 3/4 is \\frac{3}{4} and
0.75, $5 is 5 and 50% is 50.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
DECIMAL = rf"(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
# a sign belongs to a number unless it stands between two: of 7-5 the last is 5
NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])(?P<sign>[-+]))?(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<top>{DECIMAL})(?:\s*/\s*(?P<bottom>{DECIMAL}))?"
)
FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*([^{}]*?)\s*\}|([0-9]))\s*(?:\{\s*([^{}]*?)\s*\}|([0-9]))")
PLAIN = (("\u2212", "-"), ("{,}", ","), ("\\$", ""), ("$", ""), ("\\%", ""), ("%", ""), ("\\,", ""), ("\\!", ""))
MOST_DIGITS = 1000  # Python refuses to read numbers of more than 4300


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
    found = list(NUMBER.finditer(_plain(_marked(text))))
    return _value(found[-1]) if found else None


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
        raise ValueError(f"column {column!r}: {value!r} holds no number")
    return number


def _marked(text: str) -> str:
    if "####" in text:
        lines: Sequence[str] = text.rpartition("####")[2].strip().splitlines()
        return lines[0] if lines else ""
    inside = boxed(text)
    return text if inside is None else inside


def _plain(text: str) -> str:
    for before, after in PLAIN:
        text = text.replace(before, after)

    def fraction(found: re.Match[str]) -> str:
        between = " " if text[: found.start()][-1:].isdigit() else ""  # 1\frac{3}{4}: a whole number and a fraction
        return f"{between}{found[1] or found[2]}/{found[3] or found[4]}"

    return FRAC.sub(fraction, text)


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > MOST_DIGITS:
        return None
    top, bottom = _decimal(found["top"]), _decimal(found["bottom"] or "1")
    if bottom == 0:
        return None
    value = Fraction(found["whole"] or 0) + top / bottom
    return -value if found["sign"] == "-" else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
