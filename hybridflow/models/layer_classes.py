"""The classes of layers and the functions of attention for this device: chosen once, when a model is built.

On GPUs the gated delta rule in 16 bits is that of flash-linear-attention, which takes packed sequences.
"""

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import _grad_accum_fusion_available as HAVE_APEX
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hybridflow.cpu import attention as cpu_attention
from hybridflow.cpu import layers as cpu_layers
from hybridflow.cpu.kernels.library import library
from hybridflow.errors import EnvironmentProblem
from hybridflow.models.attention import (
    AttentionFunctions,
    GroupedSelfAttention,
    by_length_or_merged,
    halves,
    neighbours,
    rotation,
    with_context,
)
from hybridflow.models.attention_backends import attend_on_gpus
from hybridflow.models.delta_rule import NO_PARENT, DeltaRule, Sequences, delta_rule
from hybridflow.models.expert_rows import ExpertKernels, KernelsByTorch
from hybridflow.models.expert_triton import HAS_TRITON, KernelsByTriton
from hybridflow.models.layers import CompiledSwiGLU, RMSNorm, SwiGLU
from hybridflow.models.mixer import LinearClasses
from hybridflow.models.shared_prompt import VARLEN, AttentionKernel, bounds
from hybridflow.models.window_attention import attend_in_window
from hybridflow.parallel.device import uses_cuda

DispatcherName = Literal["auto", "alltoall", "deepep"]  # of tokens to experts


@dataclass(frozen=True)
class LayerClasses:
    """What megatron's local layers are made of, beside megatron's own classes."""

    rms_norm: type[RMSNorm] = RMSNorm
    swiglu: type[SwiGLU] = SwiGLU
    self_attention: type[GroupedSelfAttention] = GroupedSelfAttention
    layer_of_rms_norms: type[TransformerLayer] = TransformerLayer


class RMSNormInC(RMSNorm):
    function = cpu_layers.RMSNormFunctionInC


class SwiGLUInC(SwiGLU):
    function = cpu_layers.SwiGLUFunctionInC


class SelfAttentionInC(cpu_layers.TurningHeads, GroupedSelfAttention):
    """Heads are turned in the memory of their projection."""


IN_C = LayerClasses(RMSNormInC, SwiGLUInC, SelfAttentionInC, cpu_layers.SummingLayer)
ON_GPUS = LayerClasses(swiglu=CompiledSwiGLU)


def layer_classes() -> LayerClasses:
    """By the device, and on a CPU by whether there are kernels in C, on which ranks have agreed."""
    if uses_cuda():
        return ON_GPUS
    return LayerClasses() if library() is None else IN_C


def expert_kernels(*, kept: bool) -> ExpertKernels:
    """kept: whether the backward pass reads the experts' rows as the forward pass has left them.

    Then there are no more rows than copies of tokens, a number that is read back where other ranks have some of the
    experts. Rows that are made again, or never read again, may be more: that takes memory for one layer alone.
    """
    if uses_cuda() and HAS_TRITON:
        return KernelsByTriton(counts_on_device=not kept)
    return KernelsByTorch(layer_classes().swiglu.function)


def asks_for_deep_ep(wanted: DispatcherName) -> bool:
    """auto: not before DeepEP has been seen to run here: no plan counts its buffers."""
    return wanted == "deepep"


def has_transformer_engine() -> bool:
    return uses_cuda() and HAVE_TE  # megatron's word: one that cannot be imported is as good as none


def device_arguments(*, engine: bool, gated: bool) -> dict[str, Any]:
    """Of megatron's TransformerConfig. engine: layers are Transformer Engine's. gated: the activation of the MLPs."""
    return {
        "use_cpu_initialization": not uses_cuda(),
        "gradient_accumulation_fusion": engine or (uses_cuda() and HAVE_APEX),  # see `output_layer_config`
        "bias_activation_fusion": engine and gated,
        "use_te_activation_func": not engine,  # what megatron calls an activation that the layer spec names
    }


def output_layer_config(config: TransformerConfig) -> TransformerConfig:
    """Of the output layer, which is megatron's own: there apex alone adds gradients within the product.

    Transformer Engine's layers do so themselves. megatron has one argument for both.
    """
    if not config.gradient_accumulation_fusion or HAVE_APEX:
        return config
    found = copy.copy(config)
    found.gradient_accumulation_fusion = False
    return found


def linear_classes(*, engine: bool) -> LinearClasses:
    """engine: Transformer Engine's."""
    if not engine:
        return LinearClasses(ColumnParallelLinear, RowParallelLinear)
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return LinearClasses(TEColumnParallelLinear, TERowParallelLinear)


def delta_rule_function(dtype: torch.dtype) -> DeltaRule:
    """On GPUs in 16 bits by the kernels of flash-linear-attention, which take no other dtype."""
    return delta_rule_by_fla if uses_cuda() and dtype != torch.float32 else delta_rule


def attention_functions(
    dtype: torch.dtype,
    *,
    interleaved: bool = False,
    backend: str = "flash",
    window: int | None = None,
    keep: bool = False,
) -> AttentionFunctions:
    """As `layer_classes`. interleaved: rotary embedding turns neighbouring dimensions. backend: on GPUs.

    window: tokens that attention reaches back, for which there is one way a device. keep: the keys and values of other
    ranks for the backward pass, with context parallelism.
    """
    by_torch = rotation(neighbours if interleaved else halves)
    if window is not None:
        by_varlen = uses_cuda() and dtype != torch.float32
        return AttentionFunctions(attend_in_window(window, by_varlen=by_varlen), by_torch)
    if uses_cuda():
        attend = attend_on_gpus(dtype, backend)
        return AttentionFunctions(with_context(attend, VARLEN, keep=keep), by_torch, VARLEN)
    kernel = AttentionKernel(cpu_attention.flash_forward, cpu_attention.flash_backward)
    if library() is None:
        return AttentionFunctions(with_context(by_length_or_merged(kernel), kernel, keep=keep), by_torch, kernel)
    attend = with_context(cpu_attention.attend, kernel, keep=keep)
    return AttentionFunctions(attend, by_torch if interleaved else cpu_attention.rotated, kernel)


INSTALL = "`pip install fla-core`; `bash launch/setup.sh --cuda` installs it"


def delta_rule_by_fla(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, sequences: Sequences
) -> Tensor:
    """As `delta_rule`. One call for sequences that begin, and one for those that continue others.

    Errors: EnvironmentProblem where flash-linear-attention is not installed.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise EnvironmentProblem(
            "a gated delta net trains in bfloat16 on GPUs by flash-linear-attention, which is missing "
            f"({error}): {INSTALL}"
        ) from error
    tensors, levels = (query, key, value, g, beta), sequences.levels
    parts, places, left, row_of = [], [], value.new_zeros(0), dict[int, int]()
    of_sequences = torch.arange(len(value), device=value.device).split(sequences.lengths)
    for level in levels:
        whole = len(level) == len(sequences.lengths)
        at = torch.cat([of_sequences[i] for i in level])
        parents = [sequences.parents[i] for i in level]
        begins = parents[0] == NO_PARENT  # then all do
        out, states = chunk_gated_delta_rule(
            *((x if whole else x[at])[None] for x in tensors),
            initial_state=None if begins else left[[row_of[parent] for parent in parents]],
            output_final_state=len(levels) > 1,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds([sequences.lengths[i] for i in level], value.device).long(),
        )
        if whole:
            found: Tensor = out[0]
            return found
        parts.append(out[0])
        places.append(at)
        left, row_of = states, {number: row for row, number in enumerate(level)}
    return torch.cat(parts)[torch.cat(places).argsort()]
