"""A role's model without a run around it."""

from hybridflow.architecture.spec import read_spec
from hybridflow.config import RoleConfig
from hybridflow.placement import placed
from hybridflow.placement.placed import PlacedModel


def place_model(name: str, config: RoleConfig, world_size: int) -> PlacedModel:
    return placed._placed(name, config, read_spec(config.model), config.layout(name, world_size))
