"""`hybridflow.rewards:math_equal`: whether a response's last formula equals the row's answer, by math-verify and sympy.

math-verify reads LaTeX and plain expressions, sets, intervals, equations and matrices. The time limits in it are off,
which would score what they stop as wrong and say nothing: the pool's limit holds, and counts.
"""

import logging
from typing import Any


def math_equal(
    prompts: list[str], responses: list[str], columns: dict[str, list[Any]], *, answer: str = "answer"
) -> list[float]:
    """1.0 where they are equal, else 0.0, also where the response has no formula. answer: the column.

    Errors: ValueError where the column's entry is no formula.
    """
    from math_verify import parse, verify  # takes a second, with sympy: for those who ask for it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that the limits are off
    scores = []
    for response, expected in zip(responses, columns[answer], strict=True):
        gold = parse(_as_formula(str(expected)), parsing_timeout=None)
        if not gold:
            raise ValueError(f"column {answer!r}: {expected!r} is no formula that math-verify can read")
        found = parse(response, parsing_timeout=None)
        scores.append(float(bool(found) and verify(gold, found, timeout_seconds=None)))
    return scores


def _as_formula(answer: str) -> str:
    """As LaTeX, which is looked for between dollars alone."""
    return answer if "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer else f"${answer}$"
