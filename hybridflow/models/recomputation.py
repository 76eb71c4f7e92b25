"""Parts of a layer that the backward pass computes again, and megatron-core's arguments for it.

megatron computes whole layers, norms and core attention again, but for core attention of our own mixers. What is behind
them is here:

    mlp             a dense MLP; kept is what it reads
    moe             router, way of the tokens, experts; kept is what the mixture reads
    moe_act         the activation times the shares: kept is what the first matrix gives
    shared_experts  the expert of every token: kept is what it reads
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from hybridflow.config.recompute import OF_MIXTURE, Recompute, modules_of
from hybridflow.parallel.dropped_output import DroppedOutput

Function = Callable[..., Tensor]


def megatron_arguments(recompute: Recompute) -> dict[str, Any]:
    """Of TransformerConfig, which checks modules of a mixture against megatron's own kind: see `add_own_modules`."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    theirs = modules_of(recompute) & {"core_attn", "layernorm"}
    return {"recompute_granularity": "selective", "recompute_modules": sorted(theirs)}


def add_own_modules(config: TransformerConfig, recompute: Recompute) -> None:
    """Name what we compute again, too, after megatron's checks."""
    if config.recompute_granularity == "selective":
        config.recompute_modules = sorted(modules_of(recompute))


def runs_again(config: TransformerConfig, module: str) -> bool:
    """Whether a module is recomputed on its own: not where the whole layer, or the whole mixture, is recomputed."""
    if config.recompute_granularity != "selective":
        return False
    modules = config.recompute_modules or ()
    return module in modules and not (module in OF_MIXTURE and "moe" in modules)


def attention_runs_again(config: TransformerConfig) -> bool:
    """By itself or with the layer: what attention keeps is then there for one layer at a time."""
    return config.recompute_granularity == "full" or runs_again(config, "core_attn")


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


def compute_again(mlp: nn.Module) -> None:
    """Let a dense MLP run again. megatron's way takes the bias, which an MLP gives beside its output, for a result that
    has been computed: the backward pass of 0.16.1 then has no end."""
    forward = mlp.forward

    def twice(hidden: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        biases: list[Tensor | None] = []

        def output(hidden: Tensor) -> Tensor:
            found, bias = forward(hidden, **kwargs)
            biases.append(bias)
            return cast(Tensor, found)

        return again(output, hidden), biases[0]

    mlp.forward = twice


def read_and_dropped(read: Function, function: Function, *inputs: Tensor) -> Tensor:
    """read(function(*inputs)); what `function` gives is kept by nobody, and made again for the gradient of `read`."""
    dropped = DroppedOutput()
    output = read(dropped.checkpoint(function, *inputs))
    dropped.discard_output_and_register_recompute(output)
    return output
