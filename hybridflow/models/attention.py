"""Core attention over packed sequences, rotary embedding included.

On CUDA: torch's variable-length flash attention. On a CPU: a kernel of ours in C (`cpu/kernels/attention.py`), shared
prompts included. Where that one cannot be had: scaled_dot_product_attention, once for every run of sequences of equal
length (micro-batches are ordered by length, so a run is a plain view and nothing is padded), and where responses share
a prompt, as on CUDA: `shared_prompt`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from types import NoneType
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module, not_none
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.cpu.kernels import attention as native
from hybridflow.cpu.kernels.attention import Items
from hybridflow.cpu.kernels.layers import rotate
from hybridflow.cpu.kernels.threads import takes
from hybridflow.models.shared_prompt import SharedPrompts, Spans, bounds, shared_prompt_attention


@dataclass
class PackedSequences(PackedSeqParams):
    """Where sequences begin and end, and which of them are prompts that others continue.

    It travels through megatron's layers as its PackedSeqParams.

    qkv_format stays None: megatron then keeps (tokens, 1, heads, head_dim) tensors. It applies no rotary embedding
    either (it would take cosines anew in every layer): cos and sin, one row a token, come along with the sequences.
    """

    lengths: tuple[int, ...] = ()
    shared: SharedPrompts | None = None  # None: no sequence attends to another
    items: Items | None = None  # the same for the kernel on CPUs
    cos: Tensor | None = None  # (t, 1, rotary dimensions / 2); None: positions are learned
    sin: Tensor | None = None

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], device: torch.device, shared: SharedPrompts | None = None
    ) -> "PackedSequences":
        where, longest = bounds(lengths, device), max(lengths)
        return cls(
            cu_seqlens_q=where,
            cu_seqlens_kv=where,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths,
            shared=shared,
            items=items_of(lengths, shared) if device.type == "cpu" else None,
        )

    @property
    def own(self) -> Spans:
        """Every sequence with itself."""
        return Spans(self.lengths, self.lengths, self.cu_seqlens_q, self.cu_seqlens_kv, causal=True)

    def with_rotary(self, angles: Tensor, dtype: torch.dtype) -> "PackedSequences":
        """The same with the rotary angles of every token, (t, rotary dimensions / 2) float32."""
        cos, sin = (table[:, None].to(dtype) for table in (angles.cos(), angles.sin()))
        return replace(self, cos=cos, sin=sin)

    def runs(self) -> list[tuple[int, int]]:
        """(count, length) of neighbouring sequences of equal length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


def items_of(lengths: tuple[int, ...], shared: SharedPrompts | None) -> Items:
    """Sequences by themselves, and prompts with what follows them, as they lie one after another."""
    stretches = [(stop - length, length) for stop, length in zip(accumulate(lengths), lengths, strict=True)]
    if shared is None:
        return Items.of(stretches)
    prompts = iter([x for x in stretches if shared.prompts.start <= x[0] < shared.prompts.stop])
    responses = iter([x for x in stretches if shared.responses.start <= x[0] < shared.responses.stop])
    groups = [[next(prompts), *islice(responses, len(followers))] for _, followers in shared.lengths]
    alone = [x for x in stretches if not shared.prompts.start <= x[0] < shared.responses.stop]
    return Items.of(alone, groups)


class PackedAttention(MegatronModule):
    """megatron's `core_attention` for packed causal self-attention. (tokens, 1, heads / tp, head_dim) in,
    (tokens, 1, heads / tp x head_dim) out."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or not_none(config.kv_channels) ** -0.5
        self._pairs = neighbours if config.rotary_interleaved else halves

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert isinstance(packed_seq_params, PackedSequences) and attention_bias is None
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if packed_seq_params.cos is not None:
            rotary = packed_seq_params.cos, packed_seq_params.sin, self._pairs
            query, key = Rotate.apply(query, *rotary), Rotate.apply(key, *rotary)
        out = attention(query, key, value, packed=packed_seq_params, scale=self.scale)
        return out.flatten(1).unsqueeze(1)


class GroupedSelfAttention(SelfAttention):
    """megatron's self-attention, also where more tensor-parallel ranks than key/value groups share the groups.

    megatron-core 0.16.1 then gathers over the group of its global state, which is not set here. On a CPU heads are
    turned where the projection has written them, if no norm comes between.
    """

    _rotary: tuple[Tensor, Tensor] | None = None  # of the call that goes on: cosines and sines, not applied yet

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed_seq_params")
        if isinstance(packed, PackedSequences) and packed.cos is not None and self._turns(hidden_states, packed.cos):
            self._rotary = packed.cos, not_none(packed.sin)
            kwargs["packed_seq_params"] = replace(packed, cos=None, sin=None)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self._rotary = None

    def _turns(self, hidden_states: Tensor, cos: Tensor) -> bool:
        return (
            takes(hidden_states, cos)
            and not self.config.rotary_interleaved
            and self.pg_collection.tp.size() <= not_none(self.config.num_query_groups)
            and all(isinstance(norm, (IdentityOp, NoneType)) for norm in (self.q_layernorm, self.k_layernorm))
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query (t, 1, heads / tp, head_dim), key and value (t, 1, their heads here, head_dim)."""
        group, num_groups = self.pg_collection.tp, not_none(self.config.num_query_groups)
        sharing, heads = group.size() // num_groups, self.config.num_attention_heads // group.size()
        if self._rotary is not None:
            mixed = super().get_query_key_value_tensors(hidden_states, key_value_states, split_qkv=False)[0]
            by_group = mixed.squeeze(1).unflatten(-1, (-1, self.hidden_size_per_attention_head))
            query, key, value = (x.unsqueeze(1) for x in TurnedHeads.apply(by_group, *self._rotary))
            return query, key, value
        if sharing <= 1:
            found = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
            assert len(found) == 3, "no gate and no fused rotary embedding was asked for"
            return found
        rows, _ = apply_module(self.linear_qkv)(hidden_states)  # this rank's even share of the rows of its group
        rows = all_gather_last_dim_from_tensor_parallel_region(rows, group=group)
        own_group, member = divmod(group.rank(), sharing)
        own = rows.unflatten(-1, (num_groups, -1, self.hidden_size_per_attention_head))[:, :, own_group]
        query, key, value = own.split([own.shape[2] - 2, 1, 1], dim=2)
        query = query[:, :, member * heads : (member + 1) * heads]
        return self.q_layernorm(query), self.k_layernorm(key), value


Pairs = Callable[[Tensor], tuple[Tensor, Tensor]]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dimension i turns with i + d / 2, as in HuggingFace's Llama."""
    first, second = x.chunk(2, dim=-1)
    return first, second


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dimension 2 i turns with 2 i + 1, as in GLM."""
    return x[..., 0::2], x[..., 1::2]


class Rotate(torch.autograd.Function):
    """Rotary embedding (Su et al. 2021, eq. 34): (a, b) -> (a cos - b sin, b cos + a sin).

    x: (t, heads, head_dim), of which the first 2 x cos.shape[-1] dimensions turn; pairs: which of them are a and b.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _rotated(x, cos, sin, pairs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin, ctx.pairs), None, None, None


class TurnedHeads(torch.autograd.Function):
    """Queries, keys and values of a projection, on a CPU: the first two are turned as by `Rotate`, in its memory.

    mixed: (t, groups, queries of a group + 2, head_dim), of each group its queries, its key and its value; dense, and
    read by nobody else. Attention then keeps this memory alone for the backward pass, but for queries of several
    groups, which are put side by side; its gradient is written in one pass. (t, heads, head_dim) each.
    """

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.shape = mixed.shape
        turning = mixed[:, :, :-1]
        rotate(turning, cos, sin, out=turning)
        return mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad = query.new_empty(ctx.shape)
        rotate(query.reshape(grad[:, :, :-2].shape), cos, -sin, out=grad[:, :, :-2])
        rotate(key.unsqueeze(2), cos, -sin, out=grad[:, :, -2:-1])
        grad[:, :, -1] = value
        return grad, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    if pairs is halves and takes(x, cos, sin):
        return rotate(x, cos, sin)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    turning = 2 * cos.shape[-1]
    (a, b), (out_a, out_b) = pairs(x[..., :turning]), pairs(out[..., :turning])
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    out[..., turning:] = x[..., turning:]
    return out


def attention(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
    """(tokens, heads, head_dim) from query and grouped key, value: causal, on what `packed` says."""
    if packed.items is not None and takes(query, key, value):
        return native.attend(query, key, value, packed.items, scale=scale)
    if packed.shared is not None:
        return shared_prompt_attention(query, key, value, own=packed.own, shared=packed.shared, scale=scale)
    attend = varlen_attention if query.is_cuda else attention_by_length
    return attend(query, key, value, packed=packed, scale=scale)


def attention_by_length(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
    """Causal attention within each sequence: (tokens, heads, head_dim) from query and grouped key, value."""
    sizes = [count * length for count, length in packed.runs()]
    outputs = []
    for (count, length), *tensors in zip(
        packed.runs(), query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):
        # (count x length, heads, head_dim) -> (count, heads, length, head_dim)
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in tensors)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
    """The same on CUDA in one kernel (half precision), without regard to the order of lengths."""
    if query.dtype == torch.float32:  # flash attention takes 16-bit types only
        return attention_by_length(query, key, value, packed=packed, scale=scale)
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        window_size=(-1, 0),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
    return out
