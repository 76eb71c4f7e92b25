"""Where an optimizer's state may lie: on the device, or in host memory during generation or always. Pure."""

from dataclasses import replace
from typing import Literal

from hybridflow.automap.cost import Cost, Device
from hybridflow.automap.step_time import staging_cost
from hybridflow.automap.timing import Work, offload_cost, updated_rows
from hybridflow.config import TrainedRoleConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.placement.footprint import stage_optimizer_bytes
from hybridflow.placement.placed import PlacedModel

Place = bool | Literal["always"]  # of offload_optimizer


def is_staged(model: PlacedModel) -> bool:
    """Whether the state is in host memory but for the parts that a step has on the device."""
    return isinstance(model.config, TrainedRoleConfig) and model.config.offload_optimizer == "always"


def at(model: PlacedModel, place: Place) -> PlacedModel:
    """The model with its optimizer's state at another place."""
    return replace(model, config=model.config.model_copy(update={"offload_optimizer": place}))


def places(model: PlacedModel, config: AnyConfig, work: Work, device: Device, *, cuda: bool) -> tuple[Place, ...]:
    """Those that may be the best of a trained model.

    "always" leaves most memory. It is no slower than true where the copies of an iteration's steps take no longer than
    those around the rollout: true is left out then. On CPUs "always" saves nothing: the host is the device. A host
    that lacks the memory for the states of its ranks has none of both.
    """
    assert isinstance(model.config, TrainedRoleConfig), f"{model.name} has no optimizer"
    waits = config.generates and not config.generates_beside  # for an engine on the same ranks
    if not cuda:
        return (False, True) if waits else (False,)
    here, has = min(len(model.layout.ranks), work.ranks_per_host), device.profile.host_memory_bytes
    if has is not None and here * min(stage_optimizer_bytes(model.spec, model.head, model.layout, model.config)) > has:
        return (False,)
    if not waits:
        return (False, "always")
    around = offload_cost(at(model, True), device).on_share(1.0)
    return (False, True, "always") if staging(model, config, work, device).on_share(1.0) > around else (False, "always")


def staging(model: PlacedModel, config: AnyConfig, work: Work, device: Device) -> Cost:
    """What an iteration's steps take longer with "always"."""
    assert isinstance(model.config, TrainedRoleConfig), f"{model.name} has no optimizer"
    _, steps = updated_rows(model.name, config, work)
    return staging_cost(model.spec, model.layout, model.config, device, head=model.head).times(steps)
