"""The least number of ranks on which a config fits."""

import contextlib
import math

from hybridflow.config import ExperimentConfig, RoleConfig
from hybridflow.config.fixed_data import AnyConfig
from hybridflow.errors import ConfigError

TRIED = (1, 2, 3, 4, 6, 8, 16, 32, 64)  # numbers of ranks, for a config with `auto` of which no number is given


def smallest_world_size(config: AnyConfig) -> int:
    """The least number of ranks that `check_world_size` accepts. Errors: ConfigError where there is none.

    No fewer than a grid needs or a `ranks` key names; and what does not fit within one common multiple of the grids
    that lie over all ranks fits nowhere.
    """
    grids = [(role.ranks, _least_ranks(role)) for role in config.roles().values()]
    if isinstance(config, ExperimentConfig):
        engine = config.rollout_tensor_parallel_size * config.rollout.pipeline_parallel_size
        grids.append((config.rollout.ranks or config.actor.ranks, engine))
    least = max(max([least, *(rank + 1 for rank in ranks or ())]) for ranks, least in grids)
    step = math.lcm(*(least for ranks, least in grids if ranks is None))
    for world_size in range(least, least + step):
        with contextlib.suppress(ConfigError):
            config.check_world_size(world_size)
            return world_size
    try:
        config.check_world_size(least)
    except ConfigError as error:
        raise ConfigError(f"no number of ranks fits; on {least}, the least that the grids need: {error}") from error
    raise AssertionError(f"{least} ranks fit, and do not")


def _least_ranks(role: RoleConfig) -> int:
    return role.tensor_parallel_size * role.pipeline_parallel_size * (role.data_parallel_size or 1)
