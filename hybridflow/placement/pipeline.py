"""Pipeline stages and model chunks, before a run: whether the layers go up in them. Pure."""

import contextlib
from collections.abc import Iterable
from math import lcm

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import RoleConfig
from hybridflow.errors import ConfigError, remedy


def check_layers(name: str, config: RoleConfig, spec: ModelSpec) -> None:
    """Raise ConfigError unless the layers go up in the role's pipeline stages and model chunks."""
    try:
        _cut(config, spec)
    except ValueError as error:
        keys = {
            "pipeline_parallel_size": None,  # always given
            "virtual_pipeline_parallel_size": 1,
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
        }
        given = [f"{name}.{key} = {getattr(config, key)}" for key in keys if getattr(config, key) != keys[key]]
        raise ConfigError(
            f"{', '.join(given)} and num_hidden_layers = {spec.num_layers} of {spec.path}: {error}"
            f"{remedy(_stages_that_fit(name, config, spec))}"
        ) from error


def _cut(config: RoleConfig, spec: ModelSpec) -> None:
    """Errors: ValueError unless the layers go up in the role's pipeline stages and model chunks."""
    copies = lcm(config.dense_per_expert_copy, config.context_parallel_size)
    num_ranks = copies * config.tensor_parallel_size * config.pipeline_parallel_size
    config.layout_on(tuple(range(num_ranks))).stages(spec.num_layers)


def _stages_that_fit(name: str, config: RoleConfig, spec: ModelSpec) -> dict[str, list[int | None]]:
    """By key the values with which the layers go up in stages and chunks, other keys as they are: for `remedy`."""
    tried: dict[str, Iterable[int | None]] = {
        "pipeline_parallel_size": range(2, config.pipeline_parallel_size),
        "virtual_pipeline_parallel_size": range(1, config.virtual_pipeline_parallel_size),
        "num_layers_in_first_pipeline_stage": range(1, spec.num_layers),
        "num_layers_in_last_pipeline_stage": range(1, spec.num_layers),
    }
    found: dict[str, list[int | None]] = {}
    for key, values in tried.items():
        for value in values if getattr(config, key) is not None else ():
            with contextlib.suppress(ValueError):
                _cut(config.model_copy(update={key: value}), spec)
                found.setdefault(f"{name}.{key}", []).append(value)
    return found or {f"{name}.pipeline_parallel_size": [1]}
