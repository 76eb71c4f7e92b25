"""Latent attention (MLA) in place of attention, as DeepSeek-V3 and GLM-4.7-Flash have it (arXiv 2405.04434, 2.1).

For the hidden states x of a sequence, with turned parts t:

    c_q = norm(W_qa x);   c = norm(W_kva x);   k_t = rotary(W_kr x), of which all heads have the same
    q = [W_q c_q; rotary(W_qr c_q)],  k = [W_k c; k_t],  v = W_v c   of each head
    y = W_o attention(q, k, v)

In the code k_r is W_kr x, which turns to k_t. Axes, as suffixes: t tokens, h this rank's heads, d the size of q and k.

Heads are cut over the tensor-parallel ranks. What makes the narrow vectors is whole on every rank and reads the rank's
own tokens. megatron's layer does not sum the rotary key's gradient over the ranks (Megatron-LM#6839).
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
from hybridflow.models.context import ContextSpans, begin_gather, of_all_ranks
from hybridflow.models.context_attention import attention_to_whole
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
        self.linear_proj = linear.by_columns(config, heads * sizes.value_dim, hidden, pg_collection)
        if sizes.query_rank is None:
            self.linear_kv_a = ReplicatedLinear(config, sizes.cached)
            self.linear_q = linear.by_rows(config, hidden, heads * sizes.head_dim, pg_collection)
        else:
            self.linear_qkv_a = ReplicatedLinear(config, sizes.query_rank + sizes.cached)
            self.q_a_layernorm = norm(config, sizes.query_rank, eps=NORM_EPS)
            self.linear_q_b = linear.by_rows(config, sizes.query_rank, heads * sizes.head_dim, pg_collection)
        self.kv_a_layernorm = norm(config, sizes.key_rank, eps=NORM_EPS)
        outputs = heads * (sizes.plain_dim + sizes.value_dim)
        self.linear_kv_b = linear.by_rows(config, sizes.key_rank, outputs, pg_collection)

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
            mixed = self._within_rank(hidden_states, packed)
        else:
            mixed = self._over_ranks(hidden_states, packed, packed.context)
        out: tuple[Tensor, Tensor | None] = self.linear_proj(mixed.unsqueeze(1))
        return out

    def _within_rank(self, hidden: Tensor, packed: PackedSequences) -> Tensor:
        """(tokens, heads x size of v) of this rank's heads."""
        narrow_query, c, k_r = self._narrow(hidden)
        query = self._query(narrow_query)
        key_value = self.linear_kv_b(c)[0].squeeze(1)
        k_r = self._of_all_heads(k_r)

        def core(query: Tensor, key_value: Tensor, k_r: Tensor) -> Tensor:
            k_t = self._functions.rotate(k_r, not_none(packed.cos), not_none(packed.sin))
            heads = self._turned(query, packed), *self._keys_and_values(key_value, k_t)
            return self._values_alone(self._functions.attend(*heads, packed=packed, scale=self._scale))

        return self.computed(core, query, key_value, k_r)

    def _over_ranks(self, hidden: Tensor, packed: PackedSequences, spans: ContextSpans) -> Tensor:
        """The same where other ranks have parts of the sequences: the narrow vectors travel, and here become heads.

        They do so while queries are made. The heads of all tokens are there for one layer at a time.
        """
        narrow_query, c, k_r = self._narrow(hidden)
        sent = torch.cat([c, self._turned_part(k_r, packed)], dim=-1)
        if torch.is_grad_enabled() and not sent.requires_grad:
            sent = sent.detach().requires_grad_()  # of a frozen layer in front: what is made again needs one such input
        begun = [begin_gather(sent, spans.context)]
        query = self._query(narrow_query)

        def heads_of_all(sent: Tensor) -> Tensor:
            arrives = begun.pop() if begun else None  # again: none has begun
            whole = of_all_ranks(sent, spans.context, arrives)
            c, k_t = whole.split([self._sizes.key_rank, self._sizes.rotary_dim], dim=-1)
            key_value = self._in_order(self.linear_kv_b(c)[0].squeeze(1), spans.context.size)
            k_t = self._in_order(self._of_all_heads(k_t), spans.context.size)
            return torch.cat(self._keys_and_values(key_value, k_t), dim=-1)

        def attend(query: Tensor, heads: Tensor) -> Tensor:
            calls = MergedCalls(packed.own, spans.reads, self._scale, self._functions.kernel)
            k_thd, v_thd = heads.chunk(2, dim=-1)  # of all tokens
            q_thd = self._turned(query, packed)
            return self._values_alone(attention_to_whole(q_thd, k_thd, v_thd, calls, here=spans.here))

        if attention_runs_again(self.config):
            return self.computed(lambda query, sent: attend(query, heads_of_all(sent)), query, sent)
        return read_and_dropped(lambda heads: attend(query, heads), heads_of_all, sent)

    def _narrow(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's own tokens: what queries are made of, what keys and values are, and what turns of the keys."""
        sizes = self._sizes
        narrow: Any
        if sizes.query_rank is None:
            narrow_query, narrow = hidden, self.linear_kv_a(hidden)
        else:
            narrow_query, narrow = self.linear_qkv_a(hidden).split([sizes.query_rank, sizes.cached], dim=-1)
        c, k_r = narrow.split([sizes.key_rank, sizes.rotary_dim], dim=-1)
        return narrow_query, self.kv_a_layernorm(c), k_r

    def _query(self, narrow: Tensor) -> Tensor:
        """(t, heads x size of q) of all tokens and this rank's heads."""
        if self._sizes.query_rank is None:
            query = self.linear_q(narrow)[0]
        else:
            query = self.linear_q_b(self.q_a_layernorm(narrow))[0]
        found: Tensor = query.squeeze(1)
        return found

    def _of_all_heads(self, k_r: Tensor) -> Tensor:
        """Of all tokens. Heads of all ranks read this key: its gradient is the sum over the ranks."""
        found: Tensor
        if self.config.sequence_parallel:
            found = gather_from_sequence_parallel_region(k_r, group=self._group)
        else:
            found = copy_to_tensor_model_parallel_region(k_r, group=self._group)
        return found

    def _turned_part(self, k_r: Tensor, packed: PackedSequences) -> Tensor:
        """Of this rank's own tokens, which with sequence parallelism are a part of the micro-batch's."""
        cos, sin = not_none(packed.cos), not_none(packed.sin)
        if self.config.sequence_parallel:
            cos, sin = (table.chunk(self._group.size())[self._group.rank()] for table in (cos, sin))
        return self._functions.rotate(k_r, cos, sin)

    def _in_order(self, x: Tensor, ranks: int) -> Tensor:
        """Rank after rank of those that share tokens: tensor-parallel ranks have each gathered a part of theirs."""
        if not self.config.sequence_parallel:
            return x
        found: Tensor = x.unflatten(0, (self._group.size(), ranks, -1)).transpose(0, 1).flatten(0, 2)
        return found

    def _turned(self, query: Tensor, packed: PackedSequences) -> Tensor:
        """(t, heads x size of q) -> (t, heads, size of q)"""
        sizes = self._sizes
        plain, turning = query.unflatten(-1, (self._heads, -1)).split([sizes.plain_dim, sizes.rotary_dim], dim=-1)
        turned = self._functions.rotate(turning, not_none(packed.cos), not_none(packed.sin))
        return torch.cat([plain, turned], dim=-1)

    def _keys_and_values(self, key_value: Tensor, k_t: Tensor) -> tuple[Tensor, Tensor]:
        """(t, heads x (plain k, v)), (t, 1, turned k) -> each (t, heads, size of q): kernels know one size of heads."""
        sizes = self._sizes
        plain, value = key_value.unflatten(-1, (self._heads, -1)).split([sizes.plain_dim, sizes.value_dim], dim=-1)
        k_thd = torch.cat([plain, k_t.expand(-1, self._heads, -1)], dim=-1)
        if sizes.value_dim < sizes.head_dim:
            value = pad(value, (0, sizes.head_dim - sizes.value_dim))
        return k_thd, value

    def _values_alone(self, out: Tensor) -> Tensor:
        """(t, heads, size of q) -> (t, heads x size of v)"""
        return out[..., : self._sizes.value_dim].flatten(1)
