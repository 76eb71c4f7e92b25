"""The points of a curve that a page draws: all of a short one, of a long one means and ranges of stretches. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from hybridflow.reporting.runs import Curve

MOST = 400  # points of a curve: no screen shows more side by side in a chart
DIGITS = 6


def points(curve: Curve, most: int = MOST) -> dict[str, Any]:
    """x and y, lists of one length; y is None where a value is not finite.

    Of a longer curve each point stands for `per` values: x is the first of their iterations and `end` the last, y the
    mean of those that are finite, `low` and `high` the least and the largest.
    """
    per = -(-len(curve) // most)
    if per <= 1:
        return {"per": 1, "x": [x for x, _ in curve], "y": [_number(y) for _, y in curve]}
    parts = [curve[i : i + per] for i in range(0, len(curve), per)]
    values = [[y for _, y in part if math.isfinite(y)] for part in parts]
    return {
        "per": per,
        "x": [part[0][0] for part in parts],
        "end": [part[-1][0] for part in parts],
        "y": [_number(_mean(part)) for part in values],
        "low": [_number(min(part, default=math.nan)) for part in values],
        "high": [_number(max(part, default=math.nan)) for part in values],
        "lost": [len(part) - len(kept) for part, kept in zip(parts, values, strict=True)],
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values) if values else math.nan


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
