"""Core attention over packed sequences, rotary embedding included.

By torch's variable-length flash attention in 16 bits. In float32 by scaled_dot_product_attention, once for every run of
sequences of equal length: micro-batches are ordered by length, so a run is a plain view and nothing is padded. Where
responses share a prompt: `shared_prompt`. `layer_classes` may choose other functions, as on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module, not_none
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.architecture.rope import QueryGrowth
from hybridflow.models.context import ContextSpans, context_attention
from hybridflow.models.delta_rule import NO_PARENT, Sequences
from hybridflow.models.layers import OverHeads
from hybridflow.models.routing import Routing
from hybridflow.models.shared_prompt import (
    VARLEN,
    AttentionKernel,
    AttentionSpans,
    MergedCalls,
    SharedPrompts,
    attention_with_copies,
    bounds,
    causal_mask,
    merged_attention,
    varlen_attention,
)


@dataclass
class PackedSequences(PackedSeqParams):
    """Where sequences begin and end, and which of them are prompts that others continue.

    It travels through megatron's layers as PackedSeqParams, and comes again with a layer that is computed again.

    qkv_format stays None: megatron then keeps (tokens, 1, heads, head_dim) tensors. It applies no rotary embedding
    either (it would take cosines anew in every layer): cos and sin, one row a token, come along with the sequences.
    """

    lengths: tuple[int, ...] = ()
    shared: SharedPrompts | None = None  # None: no sequence attends to another
    cos: Tensor | None = None  # (t, 1, rotary dimensions / 2), times the factor; None: positions are learned
    sin: Tensor | None = None
    window_cos: Tensor | None = None  # of layers with windows; None: as of other layers
    window_sin: Tensor | None = None
    query_scale: Tensor | None = None  # (t, 1, 1): what queries are multiplied with; None: nothing
    routing: Routing | None = None  # the engine's experts of every token; None: each layer chooses experts
    context: ContextSpans | None = None  # what other ranks have of these sequences; None: they are whole

    @classmethod
    def from_lengths(
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
        )

    @property
    def own(self) -> AttentionSpans:
        """Every sequence with itself."""
        return AttentionSpans(self.lengths, self.lengths, self.cu_seqlens_q, self.cu_seqlens_kv, causal=True)

    def with_rotary(self, angles: Tensor, dtype: torch.dtype, *, factor: float = 1.0) -> "PackedSequences":
        """The same with the rotary angles of every token, (t, rotary dimensions / 2) float32.

        factor: of cosines and sines, as YaRN has it.
        """
        cos, sin = _turns(angles, dtype, factor)
        return replace(self, cos=cos, sin=sin)

    def with_window_rotary(self, angles: Tensor, dtype: torch.dtype, *, factor: float = 1.0) -> "PackedSequences":
        """The same with those of layers with windows."""
        cos, sin = _turns(angles, dtype, factor)
        return replace(self, window_cos=cos, window_sin=sin)

    def with_growth(self, positions: Tensor, dtype: torch.dtype, growth: QueryGrowth) -> "PackedSequences":
        """The same with what queries are multiplied with, 1 + beta log(1 + floor(position / length)), as in Llama 4."""
        scale = 1 + growth.beta * torch.log(1 + torch.floor(positions / growth.length))
        return replace(self, query_scale=scale[:, None, None].to(dtype))

    @property
    def sequences(self) -> Sequences:
        """Where they lie, and which of them continue a shared prompt: for layers with a state."""
        if self.shared is None:
            return Sequences(self.lengths, (NO_PARENT,) * len(self.lengths))
        return _continued(self.lengths, self.shared.prompts.start, tuple(self.shared.lengths))

    def runs(self) -> list[tuple[int, int]]:
        """(count, length) of neighbouring sequences of equal length."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


def _turns(angles: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (t, 1, rotary dimensions / 2)."""
    cos, sin = ((factor * table)[:, None].to(dtype) for table in (angles.cos(), angles.sin()))
    return cos, sin


@lru_cache(maxsize=1 << 4)  # every layer of a micro-batch asks for the same
def _continued(lengths: tuple[int, ...], start: int, groups: tuple[tuple[int, tuple[int, ...]], ...]) -> Sequences:
    """Prompts lie one after another from the token `start` on, and behind them what follows each."""
    first = next(i for i in range(len(lengths)) if sum(lengths[:i]) == start)
    followers = [first + number for number, (_, responses) in enumerate(groups) for _ in responses]
    before = first + len(groups)
    padding = len(lengths) - before - len(followers)
    return Sequences(lengths, (*(NO_PARENT,) * before, *followers, *(NO_PARENT,) * padding))


Attend = Callable[..., Tensor]  # (query, key, value, *, packed, scale) -> (tokens, heads, head_dim)


class AttentionFunctions(NamedTuple):
    """What core attention is made of."""

    attend: Attend
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]  # (t, heads, head_dim) by cosines and sines
    kernel: AttentionKernel = VARLEN  # that tells log-sum-exps


class PackedAttention(MegatronModule):
    """megatron's `core_attention` for packed causal self-attention. (tokens, 1, heads / tp, head_dim) in,
    (tokens, 1, heads / tp x head_dim) out. `functions` come with the layer's spec."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        functions: AttentionFunctions,
        **kwargs: object,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or not_none(config.kv_channels) ** -0.5
        self._attend, self._rotate, _ = functions

    def angles(self, packed: PackedSequences) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines that this layer turns queries and keys by."""
        return packed.cos, packed.sin

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
        cos, sin = self.angles(packed_seq_params)
        if cos is not None and sin is not None:
            query, key = self._rotate(query, cos, sin), self._rotate(key, cos, sin)
        if packed_seq_params.query_scale is not None:
            query = query * packed_seq_params.query_scale
        out = self._attend(query, key, value, packed=packed_seq_params, scale=self.scale)
        return out.flatten(1).unsqueeze(1)


HeadNorms = tuple[Callable[..., Any], Callable[..., Any]]  # (config, head_dim, eps) -> norm, of queries and of keys


class GroupedSelfAttention(SelfAttention):
    """megatron's self-attention, also where more tensor-parallel ranks than key/value groups share the groups.

    megatron-core 0.16.1 then gathers over the group of the global state, which is not set here.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, head_norms: HeadNorms | None = None, **kwargs: Any
    ) -> None:
        """megatron cuts a gate, and counts sinks in norms, by global groups. Our core attention has no sinks."""
        assert not config.attention_output_gate, "a gate would be cut by the global tensor-parallel rank"
        assert config.softmax_type == "vanilla", f"softmax_type {config.softmax_type}: PackedAttention leaves out sinks"
        super().__init__(config, *args, **kwargs)
        self._make_head_norms(head_norms)

    def _make_head_norms(self, head_norms: HeadNorms | None) -> None:
        """In place of what megatron has made, an IdentityOp or None by its release."""
        size, eps = self.hidden_size_per_attention_head, self.config.layernorm_epsilon
        made = (None, None) if head_norms is None else [norm(self.config, size, eps) for norm in head_norms]
        for norm in made:
            if isinstance(norm, OverHeads):
                norm.group = self.pg_collection.tp
        self.q_layernorm, self.k_layernorm = made

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
        if sharing <= 1:
            found = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
            assert len(found) == 3, "no gate and no fused rotary embedding was asked for"
            return found
        qkv, _ = apply_module(self.linear_qkv)(hidden_states)  # of this rank's even share of the rows
        qkv = all_gather_last_dim_from_tensor_parallel_region(qkv, group=group)
        own_group, member = divmod(group.rank(), sharing)
        qkv_of_group = qkv.unflatten(-1, (num_groups, -1, self.hidden_size_per_attention_head))[:, :, own_group]
        query, key, value = qkv_of_group.split([qkv_of_group.shape[2] - 2, 1, 1], dim=2)
        query = query[:, :, member * heads : (member + 1) * heads]
        norms: tuple[Any, Any] = self.q_layernorm, self.k_layernorm
        query, key = (x if norm is None else norm(x) for norm, x in zip(norms, (query, key), strict=True))
        return query, key, value


Pairs = Callable[[Tensor], tuple[Tensor, Tensor]]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dimension i turns with i + d / 2, as in HuggingFace's Llama."""
    first, second = x.chunk(2, dim=-1)
    return first, second


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dimension 2 i turns with 2 i + 1, as in GLM."""
    return x[..., 0::2], x[..., 1::2]


class Rotate(torch.autograd.Function):
    """Rotary embedding (Su et al. 2021, eq. 34): (a, b) -> (a cos - b sin, b cos + a sin), cos and sin of any length.

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


def rotation(pairs: Pairs) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`Rotate` for these pairs."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = Rotate.apply(x, cos, sin, pairs)
        return y

    return rotate


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rotary = 2 * cos.shape[-1]
    (a, b), (out_a, out_b) = pairs(x[..., :num_rotary]), pairs(out[..., :num_rotary])
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    out[..., num_rotary:] = x[..., num_rotary:]
    return out


def flash_or_exact(dtype: torch.dtype) -> Attend:
    """Attention on GPUs: torch's flash attention in 16 bits, scaled_dot_product_attention in float32."""
    if dtype == torch.float32:
        return choose_by_sharing(attention_by_length, attention_with_copies)
    return choose_by_sharing(_flash_attention, partial(merged_attention, kernel=VARLEN))


def by_length_or_merged(kernel: AttentionKernel) -> Attend:
    """Without a kernel for packed sequences: where prompts are shared, by one that tells log-sum-exps."""
    return choose_by_sharing(attention_by_length, partial(merged_attention, kernel=kernel))


def with_context(attend: Attend, kernel: AttentionKernel, *, keep: bool) -> Attend:
    """By `attend`, and by the kernel where other ranks have parts of the sequences.

    keep: the keys and values of other ranks for the backward pass.
    """

    def either(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
        if packed.context is None:
            return attend(query, key, value, packed=packed, scale=scale)
        calls = MergedCalls(packed.own, packed.context.reads, scale, kernel)
        return context_attention(query, key, value, calls, context=packed.context.context, keep=keep)

    return either


def choose_by_sharing(plain: Attend, shared: Callable[..., Tensor]) -> Attend:
    """`shared` where responses of a micro-batch share a prompt."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
        if packed.shared is None:
            return plain(query, key, value, packed=packed, scale=scale)
        return shared(query, key, value, own=packed.own, shared=packed.shared, scale=scale)

    return attend


def attention_by_length(
    query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention within each sequence: (tokens, heads, head_dim) from query and grouped key, value.

    window: how many keys a query reaches, its own included; None: all before it.
    """
    sizes = [count * length for count, length in packed.runs()]
    outputs = []
    for (count, length), *tensors in zip(
        packed.runs(), query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):
        # (count x length, heads, head_dim) -> (count, heads, length, head_dim)
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in tensors)
        mask = None if window is None else causal_mask(q, k, window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *, packed: PackedSequences, scale: float) -> Tensor:
    """The same on CUDA in one kernel, in 16 bits, without regard to the order of lengths."""
    return varlen_attention(query, key, value, packed.own, scale)
