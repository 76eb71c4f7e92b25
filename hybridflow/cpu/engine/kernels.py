"""The engine computes with kernels in C: the trainer's RMSNorm and SwiGLU, and attention and linear layers.

`patches` gives them to vLLM where this process has them. Tensors have the engine's dtype, float32 or bfloat16.

vLLM 0.32.0's attention lays keys out by dimension, so that each number of a new token's key is written to a line of
memory; vLLM's norms and activations there are chains of torch's operations. What the kernels do not know
(windows, sinks, other families' layers) stays vLLM's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridflow.cpu.kernels.layers import add_rms_norm, rms_norm, swiglu
from hybridflow.cpu.kernels.library import DTYPES
from hybridflow.cpu.kernels.linear import linear
from hybridflow.cpu.kernels.matrix import has_units
from hybridflow.cpu.kernels.paged import STEP, attend, store
from hybridflow.cpu.megatron.products import compiles_for_shapes, mkl_is_slow, repeated

Methods = dict[str, Callable[..., Any]]


def attention_in_c(theirs: type) -> Methods:
    """For vLLM's attention on CPUs, which now asks for each layer whether the kernels can compute attention."""
    their_update, their_forward = vars(theirs)["do_kv_cache_update"], vars(theirs)["forward"]

    def update(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        if is_ours(self, layer, kv_cache):
            store(key, value, kv_cache, slot_mapping)
        else:
            their_update(self, layer, key, value, kv_cache, slot_mapping)

    def forward(
        self: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if attn_metadata is None or not is_ours(self, layer, kv_cache):
            return their_forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        assert attn_metadata.causal and attn_metadata.dynamic_causal is None, "a decoder's attention is causal"
        attend(
            query,
            kv_cache,
            output,
            table=attn_metadata.block_table,
            starts=attn_metadata.query_start_loc,
            lengths=attn_metadata.seq_lens,
            longest=attn_metadata.max_seq_len,
            scale=self.scale,
        )
        return output

    return {"do_kv_cache_update": update, "forward": forward}


def norm_in_c(theirs: type) -> Methods:
    """For vLLM's RMSNorm: of the sum as it is kept, as the trainer's, where vLLM takes it before it is rounded."""
    their_norm = vars(theirs)["forward_native"]

    def norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        if not self.has_weight or self.variance_size_override is not None:
            return their_norm(self, x, residual)
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)[0]
        residual = residual.contiguous()
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon), residual

    return {"forward_native": norm, "forward_cpu": norm}


def swiglu_in_c() -> Methods:
    """For vLLM's SwiGLU."""
    return {"forward_cpu": lambda self, x: swiglu(x)}


def linear_in_c(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + b for the engine's linear layers, from the weight as it lies."""
    if x.dim() == 2 and 0 < len(x) <= most_rows(x.dtype, x.shape[1]):
        return linear(x, weight, bias)
    return linear_by_torch(x, weight, bias)


def linear_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, by the libraries that torch has."""
    if x.dim() == 2 and compiles_for_shapes(x.dtype) and (missing := repeated(len(x)) - len(x)):
        return torch.nn.functional.linear(torch.nn.functional.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]
    return torch.nn.functional.linear(x, weight, bias)


@functools.cache
def most_rows(dtype: torch.dtype, inner: int) -> int:
    """For which a linear layer is the kernel's. With more, or several threads, the libraries win (bench.few_rows)."""
    if torch.get_num_threads() > 1 or dtype not in DTYPES:
        return 0
    if has_units():
        return 512 if dtype == torch.bfloat16 else 64 if inner <= 1024 else 32
    if torch.cpu._is_avx512_bf16_supported() if dtype == torch.bfloat16 else mkl_is_slow():
        return 128 if inner <= 1024 else 64
    return 32 if dtype == torch.bfloat16 else 8


def is_ours(attention: Any, layer: Any, kv_cache: Tensor) -> bool:
    """The first answer for a layer holds for good: the layer's cache has the layout of the first writer."""
    ours: bool | None = vars(attention).get("is_ours")
    if ours is None:
        ours = attention.is_ours = (
            kv_cache.dtype in DTYPES
            and attention.kv_cache_dtype == "auto"
            and attention.attn_type == "decoder"
            and attention.head_size % STEP == 0
            and attention.alibi_slopes is None
            and attention.sliding_window == -1
            and attention.logits_soft_cap == 0
            and attention.sinks is None
        )
    return ours
