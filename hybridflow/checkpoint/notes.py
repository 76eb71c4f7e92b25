"""What a start says of its checkpoints, for the person who watches. Pure."""

import difflib
from collections.abc import Iterable

from hybridflow.config import RunConfig


def when_saved(config: RunConfig, *, saves: bool) -> list[str]:
    """When the run is saved."""
    its = config.checkpoint
    if not saves or its.save_minutes is None:
        return []
    counted = f", and every {its.save_interval} iterations" if its.save_interval else ""
    return [f"saves every {its.save_minutes:g} minutes (checkpoint.save_minutes){counted}"]


def kept_best(config: RunConfig, *, saves: bool) -> list[str]:
    """Which checkpoints are the best ones."""
    its = config.checkpoint
    if not (its.keep_best and its.saves and saves):
        return []
    every = config.metrics.eval_interval
    some = its.best_metric.startswith("eval/") and every and (its.save_interval % every or not its.save_interval)
    known = f"; only iterations that metrics.eval_interval = {every} divides have this metric" if some else ""
    return [
        f"checkpoint.keep_best = {its.keep_best}: the checkpoints with the {its.keeps} {its.best_metric} are kept "
        f"(checkpoint.best_is = {its.best_is}){known}"
    ]


def there_are(metric: str, metrics: Iterable[str]) -> str:
    """The nearest names, or all."""
    return f"there are {', '.join(difflib.get_close_matches(metric, metrics) or sorted(metrics))}"
