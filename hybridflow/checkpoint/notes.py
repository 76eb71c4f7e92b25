"""What a start says of the checkpoints, for the person who watches. Pure."""

import difflib
from collections.abc import Iterable, Mapping

from hybridflow.config import RunConfig


def when_saved(config: RunConfig, *, saves: bool) -> list[str]:
    """When the run is saved."""
    keys = config.checkpoint
    if not saves or keys.save_minutes is None:
        return []
    counted = f", and every {keys.save_interval} iterations" if keys.save_interval else ""
    return [f"saves every {keys.save_minutes:g} minutes (checkpoint.save_minutes){counted}"]


def kept_best(config: RunConfig, *, saves: bool) -> list[str]:
    """Which checkpoints are the best ones."""
    keys = config.checkpoint
    if not (keys.keep_best and keys.saves and saves):
        return []
    every = config.metrics.eval_interval
    some = keys.best_metric.startswith("eval/") and every and (keys.save_interval % every or not keys.save_interval)
    known = f"; only iterations that metrics.eval_interval = {every} divides have this metric" if some else ""
    return [
        f"checkpoint.keep_best = {keys.keep_best}: the checkpoints with the {keys.keeps} {keys.best_metric} are kept "
        f"(checkpoint.best_is = {keys.best_is}){known}"
    ]


def there_are(metric: str, metrics: Iterable[str]) -> str:
    """The nearest names, or all."""
    return f"there are {', '.join(difflib.get_close_matches(metric, metrics) or sorted(metrics))}"


def lacks_best(metric: str, metrics: Mapping[str, float]) -> str:
    """A line on the metric of checkpoint.best_metric, which an iteration lacks."""
    return (
        f"warning: checkpoint.best_metric = {metric}: this iteration has no such metric. A checkpoint without the "
        f"metric is not kept as one of the best; {there_are(metric, metrics)}"
    )
