"""What the optimizer of a trained model holds for each parameter, whichever of megatron's optimizers it is.

megatron's own ways to save it have traps (seen in 0.16.1): `fully_reshardable` gathers all of it on one replica,
`dp_reshardable` ties it to the layout, and with torch's Adam both lose the step count, after which the bias correction
is silently that of the first step. So what a rank owns is named here as it lies in memory, and others say where in the
whole parameter that is.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn

from hybridflow.models.optimizer import TrainedModel

MAIN = "fp32_param"  # megatron's names, as in megatron's checkpoints
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class OwnedState(NamedTuple):
    """What this rank's optimizer steps of a parameter."""

    parameter: nn.Parameter
    start: int  # elements start .. stop of the flattened parameter
    stop: int
    tensors: Mapping[str, Tensor]  # (stop - start,) float32 each, the optimizer's own memory


def owned_states(model: TrainedModel) -> Iterator[OwnedState]:
    """Of every parameter of which this rank has a share. Before the first step the moments are made, of zeros."""
    moments = MOMENTS[model.config.name] if model.config.name == "adam" or model.config.momentum else ()
    for part in _parts(model):
        for parameter, main, start, stop in _owned(part):
            state = part.optimizer.state[main]
            if not state:
                state |= {name: torch.zeros_like(main.data) for name in moments}
                _set_step(part.optimizer, main, 0)
            tensors = {name: state[name].view(-1) for name in moments}
            if main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                tensors[MAIN] = main.data.view(-1)
            yield OwnedState(parameter, start, stop, tensors)


def num_steps(model: TrainedModel) -> int:
    """Optimizer steps so far, as this rank's optimizer counts them; 0 where it owns nothing or does not count."""
    for part in _parts(model):
        states = [state["step"] for state in part.optimizer.state.values() if "step" in state]
        for step in [*states, *(group["step"] for group in part.optimizer.param_groups if "step" in group)]:
            return int(step)
    return 0


def set_num_steps(model: TrainedModel, steps: int) -> None:
    """Adam's bias correction goes on from there. The moments must exist: see `owned_states`."""
    for part in _parts(model):
        for main in part.optimizer.state:
            _set_step(part.optimizer, main, steps)
        if model.config.name == "adam" and not isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["step"] = steps  # where Transformer Engine's and apex's Adam keep it [read, not run]


def _set_step(optimizer: torch.optim.Optimizer, main: Tensor, steps: int) -> None:
    """torch's Adam and AdamW keep the count with each parameter; the fused kernel, on the parameter's device."""
    if isinstance(optimizer, torch.optim.Adam):
        device = main.device if optimizer.param_groups[0].get("fused") else None
        optimizer.state[main]["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)


def _parts(model: TrainedModel) -> list[MegatronOptimizer]:
    return [part for part in model.optimizer.chained_optimizers if part.optimizer is not None]


def _owned(part: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, int, int]]:
    """(parameter, what the optimizer steps in the parameter's place, start, stop)."""
    if isinstance(part, DistributedOptimizer):
        for group, ranges in zip(part.optimizer.param_groups, part.opt_group_ranges, strict=True):
            # those of float32 first: megatron's map of places is wrong where a model has parameters of two dtypes
            parameters = sorted(ranges["params"], key=lambda parameter: parameter.dtype != torch.float32)
            for parameter, main in zip(parameters, group["params"], strict=True):
                share = part._get_model_param_range_map(parameter)["param"]
                yield parameter, main, share.start, share.end
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        halves = zip(chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True)
        pairs = [*halves, *((parameter, parameter) for parameter in chain(*part.fp32_from_fp32_groups))]
    else:
        pairs = [(parameter, parameter) for group in part.optimizer.param_groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield parameter, main, 0, parameter.numel()
