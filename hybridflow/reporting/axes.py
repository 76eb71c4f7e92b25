"""What a chart may have on the x-axis in place of iterations: tokens and hours so far. Pure."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from hybridflow.reporting.points import MOST
from hybridflow.reporting.runs import Curve

SECONDS, RATE, SAVING = "time/iteration_seconds", "train/tokens_per_sec", "time/save_seconds"


def axes(curves: Mapping[str, Curve]) -> dict[str, dict[str, list[Any]]]:
    """By axis x, iterations, and y, what there was at the end of each: on straight lines in between.

    Tokens are those of prompts and responses that the run has trained on. Hours are those of iterations and saves,
    without starts and evaluations. An axis whose metrics the run lacks is left out.
    """
    seconds, rate, saving = (dict(curves.get(name, ())) for name in (SECONDS, RATE, SAVING))
    if not seconds:
        return {}
    hours = {i: (value + saving.get(i, 0.0)) / 3600 for i, value in seconds.items()}
    found = {"hours": _so_far(hours)}
    return found | ({"tokens": _so_far({i: seconds[i] * rate[i] for i in seconds if i in rate})} if rate else {})


def _so_far(of_iterations: Mapping[int, float]) -> dict[str, list[Any]]:
    x, y = [min(of_iterations) - 1, *of_iterations], list(accumulate(of_iterations.values(), initial=0.0))
    step = -(-len(x) // MOST)
    kept = sorted({*range(0, len(x), step), len(x) - 1})
    return {"x": [x[i] for i in kept], "y": [float(f"{y[i]:.7g}") for i in kept]}
