"""Latent attention (MLA) in place of attention, as DeepSeek-V3 and GLM-4.7-Flash have it (arXiv 2405.04434, 2.1).

For the hidden states x of a sequence:

    c_q = norm(W_qa x);   c_kv = norm(W_kva x);   k_unrotated = W_kr x;   k_rope = rotary(k_unrotated)
    q = [W_q c_q; rotary(W_qr c_q)],  k = [W_k c_kv; k_rope],  v = W_v c_kv   of each head; all heads share k_rope
    y = W_o attention(q, k, v)

Axes of tensors, as suffixes: t tokens, h this rank's heads, d the size of q and k (v may be padded to it), r the
rotated dimensions, 1 one head for all. q_nope and k_nope never rotate; q_unrotated and k_unrotated become rope.

Heads are cut over the tensor-parallel ranks. W_qa, W_kva and W_kr are whole on every rank and read the rank's own
tokens. megatron's layer does not sum the rotary key's gradient over the ranks (Megatron-LM#6839).
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.mixers.latent import NORM_EPS
from hybridflow.models.attention import AttentionFunctions, PackedSequences
from hybridflow.models.context import ContextSpans, attention_to_whole, begin_gather, of_all_ranks
from hybridflow.models.layers import RMSNorm, mark
from hybridflow.models.mixer import LinearClasses, Mixer
from hybridflow.models.recomputation import attention_runs_again, read_and_dropped
from hybridflow.models.shared_prompt import MergedCalls


class ReplicatedLinear(nn.Module):
    """W x of this rank's tokens. W is the same on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, outputs: int) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(outputs, config.hidden_size, dtype=config.params_dtype))
        mark(self.weight, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class LatentAttention(Mixer):
    """megatron's `self_attention` of a layer: (tokens, 1, hidden) in and out."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: LatentSizes,
        scale: float,
        linear: LinearClasses,
        norm: type[RMSNorm],
        functions: AttentionFunctions,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        """scale: of the products of queries and keys. kwargs: what a layer tells any attention."""
        super().__init__(config, layer_number)
        self._sizes, self._scale, self._functions = sizes, scale, functions
        self._group, heads, hidden = pg_collection.tp, config.num_attention_heads, config.hidden_size
        self._heads = heads // self._group.size()
        self.linear_proj = linear.row_parallel(config, heads * sizes.value_dim, hidden, pg_collection)
        if sizes.query_rank is None:
            self.linear_kv_a = ReplicatedLinear(config, sizes.cached)
            self.linear_q = linear.column_parallel(config, hidden, heads * sizes.head_dim, pg_collection)
        else:
            self.linear_qkv_a = ReplicatedLinear(config, sizes.query_rank + sizes.cached)
            self.q_a_layernorm = norm(config, sizes.query_rank, eps=NORM_EPS)
            self.linear_q_b = linear.column_parallel(config, sizes.query_rank, heads * sizes.head_dim, pg_collection)
        self.kv_a_layernorm = norm(config, sizes.key_rank, eps=NORM_EPS)
        outputs = heads * (sizes.plain_dim + sizes.value_dim)
        self.linear_kv_b = linear.column_parallel(config, sizes.key_rank, outputs, pg_collection)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(packed_seq_params, PackedSequences), "packed sequences alone"
        packed = packed_seq_params
        if packed.context is None:
            o_flat = self._within_rank(hidden_states, packed)
        else:
            o_flat = self._over_ranks(hidden_states, packed, packed.context)
        out: tuple[Tensor, Tensor | None] = self.linear_proj(o_flat.unsqueeze(1))
        return out

    def _within_rank(self, hidden: Tensor, packed: PackedSequences) -> Tensor:
        """(tokens, heads x size of v) of this rank's heads."""
        q_input, c_kv, k_unrotated_t1r = self._down(hidden)
        query = self._query(q_input)
        kv_up = self.linear_kv_b(c_kv)[0].squeeze(1)
        k_unrotated_t1r = self._of_all_heads(k_unrotated_t1r)

        def core(query: Tensor, kv_up: Tensor, k_unrotated_t1r: Tensor) -> Tensor:
            k_rope_t1r = self._functions.rotate(k_unrotated_t1r, not_none(packed.cos), not_none(packed.sin))
            qkv_thd = self._rotated(query, packed), *self._keys_and_values(kv_up, k_rope_t1r)
            return self._values_alone(self._functions.attend(*qkv_thd, packed=packed, scale=self._scale))

        return self.computed(core, query, kv_up, k_unrotated_t1r)

    def _over_ranks(self, hidden: Tensor, packed: PackedSequences, spans: ContextSpans) -> Tensor:
        """The same where ranks share the sequences: they gather c_kv and k_rope while they compute queries.

        Each rank then computes keys and values of all tokens, which are there for one layer at a time.
        """
        q_input, c_kv, k_unrotated_t1r = self._down(hidden)
        latent_rope = torch.cat([c_kv, self._rotated_part(k_unrotated_t1r, packed)], dim=-1)  # of the own tokens
        if torch.is_grad_enabled() and not latent_rope.requires_grad:
            latent_rope = latent_rope.detach().requires_grad_()  # frozen in front: recomputation needs one such input
        begun = [begin_gather(latent_rope, spans.context)]
        query = self._query(q_input)

        def kv_of_all(latent_rope: Tensor) -> Tensor:
            arrives = begun.pop() if begun else None  # again: none has begun
            latent_rope_all = of_all_ranks(latent_rope, spans.context, arrives)
            c_kv, k_rope_t1r = latent_rope_all.split([self._sizes.key_rank, self._sizes.rotary_dim], dim=-1)
            kv_up = self._in_order(self.linear_kv_b(c_kv)[0].squeeze(1), spans.context.size)
            k_rope_t1r = self._in_order(self._of_all_heads(k_rope_t1r), spans.context.size)
            return torch.cat(self._keys_and_values(kv_up, k_rope_t1r), dim=-1)

        def attend(query: Tensor, kv_thd: Tensor) -> Tensor:
            calls = MergedCalls(packed.own, spans.reads, self._scale, self._functions.kernel)
            k_thd, v_padded_thd = kv_thd.chunk(2, dim=-1)  # of all tokens
            q_thd = self._rotated(query, packed)
            return self._values_alone(attention_to_whole(q_thd, k_thd, v_padded_thd, calls, here=spans.here))

        if attention_runs_again(self.config):
            return self.computed(lambda query, latent_rope: attend(query, kv_of_all(latent_rope)), query, latent_rope)
        return read_and_dropped(lambda kv_thd: attend(query, kv_thd), kv_of_all, latent_rope)

    def _down(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q_input (W_qa x before the norm, or x itself), c_kv and k_unrotated of this rank's own tokens."""
        sizes = self._sizes
        kv_down: Any
        if sizes.query_rank is None:
            q_input, kv_down = hidden, self.linear_kv_a(hidden)
        else:
            q_input, kv_down = self.linear_qkv_a(hidden).split([sizes.query_rank, sizes.cached], dim=-1)
        c_kv_unnormed, k_unrotated_t1r = kv_down.split([sizes.key_rank, sizes.rotary_dim], dim=-1)
        return q_input, self.kv_a_layernorm(c_kv_unnormed), k_unrotated_t1r

    def _query(self, q_input: Tensor) -> Tensor:
        """(t, heads x size of q) of all tokens and this rank's heads."""
        if self._sizes.query_rank is None:
            query = self.linear_q(q_input)[0]
        else:
            query = self.linear_q_b(self.q_a_layernorm(q_input))[0]
        found: Tensor = query.squeeze(1)
        return found

    def _of_all_heads(self, k_t1r: Tensor) -> Tensor:
        """Of all tokens. Heads of all ranks read this key: its gradient is the sum over the ranks."""
        found: Tensor
        if self.config.sequence_parallel:
            found = gather_from_sequence_parallel_region(k_t1r, group=self._group)
        else:
            found = copy_to_tensor_model_parallel_region(k_t1r, group=self._group)
        return found

    def _rotated_part(self, k_unrotated_t1r: Tensor, packed: PackedSequences) -> Tensor:
        """Of this rank's own tokens, which with sequence parallelism are a part of the micro-batch's."""
        cos, sin = not_none(packed.cos), not_none(packed.sin)
        if self.config.sequence_parallel:
            cos, sin = (table.chunk(self._group.size())[self._group.rank()] for table in (cos, sin))
        return self._functions.rotate(k_unrotated_t1r, cos, sin)

    def _in_order(self, x: Tensor, ranks: int) -> Tensor:
        """Rank after rank of those that share tokens: tensor-parallel ranks have each gathered a part of theirs."""
        if not self.config.sequence_parallel:
            return x
        found: Tensor = x.unflatten(0, (self._group.size(), ranks, -1)).transpose(0, 1).flatten(0, 2)
        return found

    def _rotated(self, query: Tensor, packed: PackedSequences) -> Tensor:
        """(t, heads x size of q) -> (t, heads, size of q)"""
        sizes = self._sizes
        q_nope, q_unrotated = query.unflatten(-1, (self._heads, -1)).split([sizes.plain_dim, sizes.rotary_dim], dim=-1)
        q_rope = self._functions.rotate(q_unrotated, not_none(packed.cos), not_none(packed.sin))
        return torch.cat([q_nope, q_rope], dim=-1)

    def _keys_and_values(self, kv_up: Tensor, k_rope_t1r: Tensor) -> tuple[Tensor, Tensor]:
        """(t, heads x (k_nope, v)), (t, 1, r) -> each (t, heads, size of q): kernels know one size of heads."""
        sizes = self._sizes
        k_nope, value = kv_up.unflatten(-1, (self._heads, -1)).split([sizes.plain_dim, sizes.value_dim], dim=-1)
        k_thd = torch.cat([k_nope, k_rope_t1r.expand(-1, self._heads, -1)], dim=-1)
        if sizes.value_dim < sizes.head_dim:
            value = pad(value, (0, sizes.head_dim - sizes.value_dim))
        return k_thd, value

    def _values_alone(self, out: Tensor) -> Tensor:
        """(t, heads, size of q) -> (t, heads x size of v)"""
        return out[..., : self._sizes.value_dim].flatten(1)
