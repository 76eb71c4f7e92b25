"""Which kernels attention in 16 bits takes on a GPU: flash attention 2 or 3 of torch, or cuDNN's.

`ROLE.megatron_arguments.attention_backend` asks, by megatron's words. "flash", the default: torch's flash attention, 3
where the GPU is a Hopper and the package flash_attn_interface is there, else 2. "fused": cuDNN's by Transformer Engine,
which plans anew for lengths that it has not seen. Either is taken only where it is right here: on packed sequences and
on prompts that several responses share, outputs and gradients are compared with attention in float64, once a process.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from hybridflow.errors import UserError
from hybridflow.models.attention import (
    Attend,
    PackedSequences,
    attention_by_length,
    choose_by_sharing,
    flash_or_exact,
)
from hybridflow.models.shared_prompt import (
    AttentionKernel,
    AttentionSpans,
    SharedPrompts,
    attention_with_copies,
    merged_attention,
)
from hybridflow.parallel.device import current_device

FLASH3, HOPPER = "flash_attn_interface", 9
TOLERANCE = 2e-2  # of the largest value, in bfloat16
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
# two responses alone, two prompts, and what follows the first and the second prompt
LENGTHS, GROUPS, ALONE = (40, 17, 130, 5, 33, 64, 1, 20), [(130, (33, 64)), (5, (1, 20))], 57


def attend_on_gpus(dtype: torch.dtype, backend: str) -> Attend:
    """backend: "flash" or "fused", which float32 has nothing to do with. Errors: UserError where "fused" cannot be."""
    if dtype != torch.float32 and backend == "fused":
        if (reason := why_not_fused()) is not None:
            key = "megatron_arguments.attention_backend"
            raise UserError(f"{key} = fused: takes cuDNN's attention; {reason}. Write {key} = flash")
        return by_kernel(FUSED)
    if dtype != torch.float32:
        why_not_flash3()
    return flash_or_exact(dtype)


@cache
def why_not_flash3() -> str | None:
    """Activates flash attention 3 in torch, for this process; else why it stays off."""
    if current_flash_attention_impl() is not None:
        return None  # somebody's choice
    if find_spec(FLASH3) is None:
        return f"No module named '{FLASH3}'"
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return "it takes a Hopper GPU"
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        return str(error)
    reason = why_wrong(flash_or_exact(torch.bfloat16), current_device())
    if reason is not None:
        restore_flash_attention_impl()
    return reason


@cache
def why_not_fused() -> str | None:
    try:
        _transformer_engine()
    except ImportError as error:
        return f"Transformer Engine: {error}"
    return why_wrong(by_kernel(FUSED), current_device())


# ------------------------------------------------------------------------------------------------ cuDNN's


def fused_forward(
    query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans, scale: float
) -> tuple[Tensor, Tensor]:
    out, (lse, *_) = _transformer_engine().fused_attn_fwd(
        is_training=True, o_format="thd", **_fused_arguments(query, key, value, spans, scale)
    )
    assert lse.shape == (*query.shape[:2], 1), f"log-sum-exp {tuple(lse.shape)} of {tuple(query.shape)}"
    return out, lse.squeeze(-1)


def fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: AttentionSpans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dropout = torch.zeros(2, dtype=torch.int64, device=query.device)  # the state of dropout, of which there is none
    dq, dk, dv, *_ = _transformer_engine().fused_attn_bwd(
        o=out.contiguous(),
        d_o=grad.contiguous(),
        aux_ctx_tensors=[lse.contiguous().unsqueeze(-1), dropout],
        o_format="thd",
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        **_fused_arguments(query, key, value, spans, scale),
    )
    return dq, dk, dv


def _transformer_engine() -> Any:
    return import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")


def _fused_arguments(query: Tensor, key: Tensor, value: Tensor, spans: AttentionSpans, scale: float) -> dict[str, Any]:
    return dict(
        q=query.contiguous(),
        k=key.contiguous(),
        v=value.contiguous(),
        fake_dtype=query.dtype,
        max_seqlen_q=max(spans.queries),
        max_seqlen_kv=max(spans.keys),
        cu_seqlens_q=spans.query_bounds,
        cu_seqlens_kv=spans.key_bounds,
        cu_seqlens_q_padded=spans.query_bounds,
        cu_seqlens_kv_padded=spans.key_bounds,
        fused_attention_backend=_transformer_engine().FusedAttnBackend["F16_arbitrary_seqlen"],
        attn_scale=scale,
        qkv_layout="thd_thd_thd",
        attn_mask_type="padding_causal" if spans.causal else "padding",
        window_size=(-1, 0) if spans.causal else (-1, -1),
    )


FUSED = AttentionKernel(fused_forward, fused_backward)


def by_kernel(kernel: AttentionKernel) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
        own, shared = packed.own, packed.shared
        return merged_attention(query, key, value, own=own, shared=shared, scale=scale, kernel=kernel)

    return attend


# ------------------------------------------------------------------------------------------------ right or wrong


def why_wrong(attend: Attend, device: torch.device) -> str | None:
    """None where outputs and gradients in bfloat16 are those of float64, on packed sequences and shared prompts."""
    shared = SharedPrompts.from_lengths(GROUPS, start=ALONE, device=device)
    exact = choose_by_sharing(attention_by_length, attention_with_copies)
    for name, packed in (
        ("packed sequences", PackedSequences.from_lengths(LENGTHS, device)),
        ("shared prompts", PackedSequences.from_lengths(LENGTHS, device, shared)),
    ):
        expected = _outputs_and_gradients(exact, packed, torch.float64, device)
        try:
            found = _outputs_and_gradients(attend, packed, torch.bfloat16, device)
        except RuntimeError as error:  # a kernel that takes no such sizes is not the end of the run
            return f"on {name}: {str(error).splitlines()[0]}"
        worst = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        if not worst <= TOLERANCE:
            return f"on {name} it differs from float64 by {worst:.2g} of the largest value"
    return None


def _outputs_and_gradients(
    attend: Callable[..., Tensor], packed: PackedSequences, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(sum(LENGTHS), heads, HEAD_DIM, generator=generator) for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)
    ]
    weight, *inputs = (x.bfloat16().to(device, dtype) for x in drawn)
    leaves = [x.requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = attend(*leaves, packed=packed, scale=HEAD_DIM**-0.5)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
