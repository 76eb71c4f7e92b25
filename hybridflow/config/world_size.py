"""The least number of ranks on which a config fits."""

import math

from hybridflow.config import ExperimentConfig, RoleConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import ConfigError

TRIED = (1, 2, 3, 4, 6, 8, 16, 32, 64)  # numbers of ranks, for a config with `auto` of which no number is given


def smallest_world_size(config: AnyConfig) -> int:
    """The least number of ranks that `check_world_size` accepts. Errors: ConfigError where there is none."""
    world_size, problem = world_size_to_try(config)
    if problem is not None:
        raise ConfigError(f"no number of ranks fits; on {world_size}, the least that the grids need: {problem}")
    return world_size


def world_size_to_try(config: AnyConfig) -> tuple[int, ConfigError | None]:
    """The least number of ranks that fits; where none does, the least that the grids need, and what is wrong with it.

    No fewer than a grid needs or a `ranks` key names; and what does not fit within one common multiple of the grids
    that lie over all ranks fits nowhere.
    """
    grids = [(role.ranks, _least_ranks(role)) for role in config.roles().values()]
    if isinstance(config, ExperimentConfig):
        engine = config.rollout_tensor_parallel_size * config.rollout.pipeline_parallel_size
        grids.append((config.rollout.ranks or config.actor.ranks, engine))
    least = max(max([least, *(rank + 1 for rank in ranks or ())]) for ranks, least in grids)
    step = math.lcm(*(least for ranks, least in grids if ranks is None))
    first: ConfigError | None = None
    for world_size in range(least, least + step):
        try:
            config.check_world_size(world_size)
        except ConfigError as error:
            first = first or error
        else:
            return world_size, None
    assert first is not None, f"{least} ranks fit, and do not"
    return least, first


def _least_ranks(role: RoleConfig) -> int:
    context = role.context_parallel_size
    if role.data_parallel_size is not None:
        copies = context * role.data_parallel_size
    else:
        copies = math.lcm(context, role.dense_per_expert_copy)
    return role.tensor_parallel_size * role.pipeline_parallel_size * copies
