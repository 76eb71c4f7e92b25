"""`hybridflow.rewards:math_equal`: whether a response's last formula equals the row's answer, by math-verify and sympy.

math-verify reads LaTeX and plain expressions, sets, intervals, equations and matrices. The time limits in it are off,
which would score what they stop as wrong and say nothing: the pool's limit holds, and counts.
"""

import functools
import logging
import re
from typing import Any

from hybridflow.rewards.expected import alternatives, plain
from hybridflow.rewards.numeric import boxes, said_at_last, taken_back

DIGIT = re.compile("[0-9]")
MARKED = re.compile(r"(?<!\\)\$|\\(?:boxed|[(\[])")  # \$5 is a price
# between boxes that are one answer: \boxed{1}, y = \boxed{2}; behind other words a box replaces the earlier ones
BESIDE = re.compile(r"(?:[\s,;$&=\\()\[\]]|and\b|or\b|[A-Za-z](?![A-Za-z]))*")


def math_equal(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, answer: str = "answer"
) -> list[float]:
    """1.0 where they are equal, else 0.0, also where the response has no formula. answer: the column.

    Its entry may be several answers, of which each is right. Errors: ValueError where the entry is no formula.
    """
    from math_verify import verify

    return [
        float(any(verify(list(gold), found, timeout_seconds=None) for gold in formulas(expected, answer) if found))
        for response, expected in zip(responses, columns[answer], strict=True)
        for found in [_parsed(_last_answer(response))]
    ]


def formulas(value: Any, column: str) -> list[tuple[Any, ...]]:
    """The right ones of a row, as math-verify reads each. Errors: ValueError naming the column and the value."""
    given = [plain(one) for one in alternatives(value, column) if not isinstance(one, bool)]
    found = [gold for one in given if (gold := _gold(one))]
    if not found:
        raise ValueError(f"column {column!r}: {value!r} is no formula that math-verify can read")
    return found


def check_formula(value: Any, column: str) -> None:
    """Errors: as `formulas`. What has a digit is one: math-verify takes milliseconds a formula."""
    if not any(DIGIT.search(plain(one)) for one in alternatives(value, column) if not isinstance(one, bool)):
        formulas(value, column)


@functools.lru_cache(1 << 12)
def _gold(answer: str) -> tuple[Any, ...]:
    """As LaTeX, which is looked for between dollars alone."""
    return tuple(_parsed(answer if MARKED.search(answer) else f"${answer}$"))


def _parsed(text: str) -> list[Any]:
    from math_verify import parse  # takes a second, with sympy: for those who ask for it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that the limits are off
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _last_answer(response: str) -> str:
    """Without boxes that the last one replaces; or what takes that back."""
    text = said_at_last(response)
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    ends = boxes(text)
    again = taken_back(text[ends.get(start, start) :])
    if again is not None:
        return f"${again.replace('$', '')}$"
    for first, last in sorted(ends.items(), reverse=True):
        if last <= start and BESIDE.fullmatch(text, last, start):
            start = first
    return text[start:] if min(ends, default=0) < start else text
