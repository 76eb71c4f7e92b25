"""Which configs can evaluate: every how many iterations, on which sets, and whether anything says what is right."""

from hybridflow.config.data import DataConfig
from hybridflow.config.run import MetricsConfig


def check_evaluation(data: DataConfig, metrics: MetricsConfig, *, functions_judge: bool) -> None:
    """functions_judge: the section reward says what is right where nothing else does. Errors: ValueError."""
    every = metrics.eval_interval
    if every and not (metrics.eval_reward or data.environment or functions_judge):
        who = "metrics.eval_reward, data.environment, or functions in reward"
        raise ValueError(f"metrics.eval_interval = {every} needs {who}")
    for name, each in data.heldout_sets.items():
        key = f"data.heldout.{name}.interval = {each.interval}"
        if each.interval is not None and not every:
            raise ValueError(f"{key} needs metrics.eval_interval, which is 0")
        if each.interval is not None and each.interval % every:
            raise ValueError(f"{key}: is no multiple of metrics.eval_interval = {every}")
