"""Which of vLLM's kernels computes the engine's experts, and which one vLLM would take without a trainer beside it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import vllm.envs as envs
from torch import nn
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

READ_AS_THEY_STAND = ("CPU", "TRITON", "BATCHED_TRITON")  # vLLM's kernels for experts; on a CPU see cpu/engine


def expert_methods(model: nn.Module) -> Iterator[tuple[nn.Module, UnquantizedFusedMoEMethod]]:
    """Layers of experts, each with what vLLM computes the layer by."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            yield module, method


def expert_note(model: nn.Module) -> str | None:
    """A line for people: the kernels of the first layer of experts; None where there is no such layer.

    Also what vLLM alone would choose, if that reorders weights, and whether vLLM has tiles that were tuned for the
    layer's sizes on this device.
    """
    layer, method = next(expert_methods(model), (None, None))
    if layer is None or method is None:
        return None
    line = f"the engine computes experts by {method.unquantized_backend.value}, on the weights that are trained"
    theirs, _ = select_unquantized_moe_backend(replace(method.moe, moe_backend="auto"))
    if theirs.name not in READ_AS_THEY_STAND:
        line += f". vLLM alone would take {theirs.value}, which reorders weights and needs a copy of them"
    if method.unquantized_backend.name == "TRITON":
        held, _, size = layer.get_parameter("w2_weight").shape
        if not _is_tuned(held, size):
            line += (
                f". vLLM has no tuned tiles for {held} experts of {size} on this device: VLLM_TUNED_CONFIG_FOLDER "
                "takes those that vLLM's benchmark_moe.py finds"
            )
    return line


def _is_tuned(num_experts: int, size: int) -> bool:
    name = fused_moe.get_config_file_name(num_experts, size, None)
    folders = [Path(fused_moe.__file__).parent / "configs", Path(envs.VLLM_TUNED_CONFIG_FOLDER or "/dev/null")]
    return any((folder / name).is_file() for folder in folders)
