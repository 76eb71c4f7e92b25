"""How the scores of sampled responses are spread, at the beginning of a run and at the end. Pure."""

import math
from typing import Any

from hybridflow.reporting.runs import Samples

BINS = 16


def score_histogram(samples: Samples) -> dict[str, Any] | None:
    """Counts of training samples with a finite score: `first` and `last` of the two halves of the iterations.

    `edges` are those of bins of one width, BINS + 1; of one value alone two. `iterations`: the first and last of each
    half. None where no sample has such a score.
    """
    scores = {i: [float(x) for row in rows if _counts(x := row.get("score"), row)] for i, rows in _ordered(samples)}
    numbers = [i for i, own in scores.items() if own]
    if not numbers:
        return None
    half = (len(numbers) + 1) // 2
    low, high = (f(x for own in scores.values() for x in own) for f in (min, max))
    bins = BINS if low < high else 1
    width = (high - low) / bins
    halves: list[list[int]] = []
    for some in (numbers[:half], numbers[half:]):
        counts = [0] * bins
        for value in (x for i in some for x in scores[i]):
            counts[min(int((value - low) / width), bins - 1) if width else 0] += 1
        halves.append(counts)
    return {
        "edges": [float(f"{low + k * width:.6g}") for k in range(bins + 1)],
        "first": halves[0],
        "last": halves[1],
        "iterations": [[some[0], some[-1]] for some in (numbers[:half], numbers[half:]) if some],
    }


def _ordered(samples: Samples) -> list[tuple[int, Any]]:
    return sorted(samples.by_iteration.items())


def _counts(score: object, row: dict[str, Any]) -> bool:
    number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    return number and row.get("kind") != "heldout"
