"""Parts of a layer that the backward pass computes again, and megatron-core's arguments for it.

Whole layers, core attention, norms and dense MLPs are megatron's to compute again, but for core attention of our own
mixers. Of a mixture of experts, which is our own, all is here:

    moe             router, way of the tokens, experts; kept is what the mixture reads
    moe_act         the activation times the shares: kept is what the first matrix gives
    shared_experts  the expert of every token: kept is what it reads
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridflow.config.recompute import OF_MIXTURE, Recompute, modules_of
from hybridflow.parallel.dropped_output import DroppedOutput

Function = Callable[..., Tensor]


def megatron_arguments(recompute: Recompute) -> dict[str, Any]:
    """Of TransformerConfig. megatron checks modules of a mixture against its own kind: see `add_own_modules`."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    theirs = modules_of(recompute) - {"moe", *OF_MIXTURE}
    return {"recompute_granularity": "selective", "recompute_modules": sorted(theirs)}


def add_own_modules(config: TransformerConfig, recompute: Recompute) -> None:
    """Name the modules of our mixtures, too, after megatron's checks."""
    if config.recompute_granularity == "selective":
        config.recompute_modules = sorted(modules_of(recompute))


def runs_again(config: TransformerConfig, module: str) -> bool:
    """Whether a module is computed again by itself: not in a layer, or in a mixture, that is computed again whole."""
    if config.recompute_granularity != "selective":
        return False
    modules = config.recompute_modules or ()
    return module in modules and not (module in OF_MIXTURE and "moe" in modules)


def needs_gradients_of_inputs(config: TransformerConfig) -> bool:
    """Whether megatron computes something with weights again, which it does only for inputs that have a gradient."""
    if config.recompute_granularity == "full":
        return True
    return any(runs_again(config, module) for module in ("mlp", "moe", "shared_experts"))


def again(function: Function, *inputs: Tensor) -> Tensor:
    """function(*inputs), and once more in the backward pass. Kept are the inputs alone."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    found: Tensor = checkpoint(function, False, *inputs)
    return found


def read_and_dropped(read: Function, function: Function, *inputs: Tensor) -> Tensor:
    """read(function(*inputs)); what `function` gives is kept by nobody, and made again for the gradient of `read`."""
    dropped = DroppedOutput()
    output = read(dropped.checkpoint(function, *inputs))
    dropped.discard_output_and_register_recompute(output)
    return output
