"""By which metric checkpoints are the best ones: whether high or low is good, and whether a run has it at all.

lower_is_better("eval/loss")             True
lower_is_better("reward/score_mean")     False
"""

import difflib
import re
from collections.abc import Collection

from hybridflow.errors import Mendable

LOWER = re.compile(
    r"(?<![a-z])(?:loss|perplexity|ppl|kl|nll|errors?|mse|mae|grad_norm|seconds|ms|bytes|mb|diff|truncated|timeouts|"
    r"failed|dropped|lost|idle|overlong|penalty)(?![a-z])"
)
OF_CALLS = ("reward/errors", "reward/timeouts", "reward/row_mean_ms", "reward/row_max_ms", "reward/latency_ms")
AREAS = frozenset(
    "actor critic data environment eval kl memory reshard reward reward_model rollout sampling speed time train".split()
)


def lower_is_better(metric: str) -> bool:
    """By the metric's name. A reward function's name says nothing: a higher score is better."""
    area, _, name = metric.partition("/")
    if area == "reward":
        return metric in OF_CALLS
    return area == "kl" or LOWER.search(name.rpartition("/")[2] or area) is not None


def check_best_metric(metric: str, areas: Collection[str], *, eval_interval: int, kind: str) -> None:
    """Raise ValueError where no iteration of such a run has a metric of that area. areas: those that it has."""
    key, (area, slash, _) = f"checkpoint.best_metric = {metric}", metric.partition("/")
    if area == "eval" and slash and not eval_interval:
        raise Mendable(f"{key} needs metrics.eval_interval, which is 0", {"metrics.eval_interval": [1]})
    if slash and area in areas:
        return
    if area == "reward" and slash:
        why = f"{key}: there are no rewards; name a metric of this run, such as {_example_metrics(areas)}"
        raise Mendable(why, {"checkpoint.best_metric": [f"{_trained(areas)}/loss"]})
    near = difflib.get_close_matches(area, areas, n=1)
    known = f"did you mean {near[0]}/...?" if near and slash else f"{kind} has metrics of {', '.join(sorted(areas))}"
    raise ValueError(f"{key}: {'there is no such area' if slash else 'a metric is called area/name'}; {known}")


def _example_metrics(areas: Collection[str]) -> str:
    return f"eval/loss or {_trained(areas)}/loss"


def _trained(areas: Collection[str]) -> str:
    return "reward_model" if "reward_model" in areas else "actor"
