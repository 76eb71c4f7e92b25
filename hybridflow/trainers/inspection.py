"""The config of a run that looks at another run: a replay of the other's batches, or rollouts alone."""

from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig


def config_for_inspection(config: ExperimentConfig, *, replay: Path | None, rollout_only: bool) -> ExperimentConfig:
    """The config of a replay or of rollouts alone. A new directory leaves the other run's directory as it is. The run
    begins with the given models or checkpoint, and never resumes a former replay."""
    metrics: dict[str, Any] = {}
    if replay is not None:
        metrics["eval_interval"] = 0  # which takes an engine
    if rollout_only:
        metrics["dump_batches"] = True
    if not metrics:
        return config
    checkpoint: dict[str, Any] = {"save_interval": 0, "save_minutes": None}
    if config.checkpoint.load == "auto":
        checkpoint["load"] = "none"
    return config.model_copy(
        update={
            "name": f"{config.name}-{'rollout' if rollout_only else 'replay'}",
            "stop_when": None,
            "metrics": config.metrics.model_copy(update=metrics),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        }
    )
