"""What a rank's optimizer steps and keeps, element by element: for checkpoints and for a step in parts.

megatron's own ways to save the state have traps (seen in 0.16.1): `fully_reshardable` gathers all of it on one replica,
`dp_reshardable` ties it to the layout, and with torch's Adam both lose the step count, after which the bias correction
is silently that of the first step. So `OwnedState` names what a rank owns as it lies in memory, whichever of megatron's
optimizers it is; `checkpoint.sharded` says where in the whole parameter that is.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn

from hybridflow.config import OptimizerConfig

MAIN = "fp32_param"  # megatron's names, as in megatron's checkpoints
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class OwnedState(NamedTuple):
    """What this rank's optimizer steps of a parameter."""

    parameter: nn.Parameter
    start: int  # elements start .. stop of the flattened parameter
    stop: int
    tensors: Mapping[str, Tensor]  # (stop - start,) float32 each, the optimizer's own memory


class Stepped(NamedTuple):
    """A share of a parameter, and the tensor that the optimizer steps in the share's place."""

    parameter: nn.Parameter
    main: Tensor
    start: int  # elements start .. stop of the flattened parameter
    stop: int

    @property
    def has_copy(self) -> bool:
        """Whether `main` is a float32 copy: of float32 parameters it is a view."""
        return self.main.untyped_storage().data_ptr() != self.parameter.untyped_storage().data_ptr()


def moments_of(config: OptimizerConfig) -> tuple[str, ...]:
    """The tensors that the optimizer keeps of each element."""
    return MOMENTS[config.name] if config.name == "adam" or config.momentum else ()


def owned_states(parts: Sequence[MegatronOptimizer], moments: Sequence[str]) -> Iterator[OwnedState]:
    """Of every parameter of which this rank has a share. Before the first step the moments are made, of zeros."""
    for part in parts:
        for each in stepped(part):
            state = part.optimizer.state[each.main]
            if not state:
                state |= {name: torch.zeros_like(each.main.data) for name in moments}
                _set_step(part.optimizer, each.main, 0)
            tensors = {name: state[name].view(-1) for name in moments}
            if each.has_copy:
                tensors[MAIN] = each.main.data.view(-1)
            yield OwnedState(each.parameter, each.start, each.stop, tensors)


def num_steps(parts: Sequence[MegatronOptimizer]) -> int:
    """Optimizer steps so far, as this rank's optimizer counts them; 0 where it owns nothing or does not count."""
    for part in parts:
        states = [state["step"] for state in part.optimizer.state.values() if "step" in state]
        for step in [*states, *(group["step"] for group in part.optimizer.param_groups if "step" in group)]:
            return int(step)
    return 0


def set_num_steps(parts: Sequence[MegatronOptimizer], steps: int) -> None:
    """Adam's bias correction goes on from there. The moments must exist: see `owned_states`."""
    for part in parts:
        for main in part.optimizer.state:
            _set_step(part.optimizer, main, steps)
        if counts_in_groups(part):
            for group in part.optimizer.param_groups:
                group["step"] = steps


def counts_in_groups(part: MegatronOptimizer) -> bool:
    """Whether the optimizer counts steps in each group, as Transformer Engine's and apex's Adam do [read, not run]."""
    return part.config.optimizer == "adam" and not isinstance(part.optimizer, torch.optim.Adam)


def count_device(optimizer: torch.optim.Optimizer, main: Tensor) -> torch.device | None:
    """Where torch's Adam and AdamW keep the count of steps: the fused kernel, on the parameter's device."""
    return main.device if optimizer.param_groups[0].get("fused") else None


def _set_step(optimizer: torch.optim.Optimizer, main: Tensor, steps: int) -> None:
    """torch's Adam and AdamW keep the count with each parameter."""
    if isinstance(optimizer, torch.optim.Adam):
        device = count_device(optimizer, main)
        optimizer.state[main]["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)


def stepped(part: MegatronOptimizer) -> Iterator[Stepped]:
    """All that the optimizer steps, as its groups have it."""
    if isinstance(part, DistributedOptimizer):
        for group, ranges in zip(part.optimizer.param_groups, part.opt_group_ranges, strict=True):
            # those of float32 first: megatron's map of places is wrong where a model has parameters of two dtypes
            parameters = sorted(ranges["params"], key=lambda parameter: parameter.dtype != torch.float32)
            for parameter, main in zip(parameters, group["params"], strict=True):
                share = part._get_model_param_range_map(parameter)["param"]
                yield Stepped(parameter, main, share.start, share.end)
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        halves = zip(chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True)
        pairs = [*halves, *((parameter, parameter) for parameter in chain(*part.fp32_from_fp32_groups))]
    else:
        pairs = [(parameter, parameter) for group in part.optimizer.param_groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield Stepped(parameter, main, 0, parameter.numel())
