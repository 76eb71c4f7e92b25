"""Latent attention (MLA) in place of attention, as DeepSeek-V3 and GLM-4.7-Flash have it (arXiv 2405.04434, 2.1).

For the hidden states x of a sequence, with turned parts t:

    c_q = norm(W_qa x);   c = norm(W_kva x);   k_t = rotary(W_kr x), of which all heads have the same
    q = [W_q c_q; rotary(W_qr c_q)],  k = [W_k c; k_t],  v = W_v c   of each head
    y = W_o attention(q, k, v)

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
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from hybridflow.architecture.latent_weights import NORM_EPS
from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.models.attention import AttentionFunctions, PackedSequences
from hybridflow.models.layers import RMSNorm, mark
from hybridflow.models.mixer import LinearClasses, Mixer


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
        inputs, packed = self._heads_and_key(hidden_states), packed_seq_params

        def core(query: Tensor, key_value: Tensor, rotary_key: Tensor) -> Tensor:
            return self._attention(query, key_value, rotary_key, packed)

        mixed = self.computed(core, *inputs)
        out: tuple[Tensor, Tensor | None] = self.linear_proj(mixed.unsqueeze(1))
        return out

    def _heads_and_key(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of all tokens: this rank's heads of queries, and of keys with values, and what turns of the keys."""
        sizes = self._sizes
        narrow: Any
        if sizes.query_rank is None:
            query, narrow = self.linear_q(hidden)[0], self.linear_kv_a(hidden)
        else:
            narrow_query, narrow = self.linear_qkv_a(hidden).split([sizes.query_rank, sizes.cached], dim=-1)
            query = self.linear_q_b(self.q_a_layernorm(narrow_query))[0]
        latent, rotary_key = narrow.split([sizes.key_rank, sizes.rotary_dim], dim=-1)
        key_value = self.linear_kv_b(self.kv_a_layernorm(latent))[0]
        # heads of all ranks read this key: its gradient is the sum over the ranks
        if self.config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self._group)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self._group)
        return query.squeeze(1), key_value.squeeze(1), rotary_key

    def _attention(self, query: Tensor, key_value: Tensor, rotary_key: Tensor, packed: PackedSequences) -> Tensor:
        """(t, heads x size of q), (t, heads x (plain k, v)), (t, 1, turned k) -> (t, heads x size of v)."""
        sizes, (attend, rotate), cos, sin = self._sizes, self._functions, packed.cos, packed.sin
        assert cos is not None and sin is not None, "positions are turned"
        query, key_value = (x.unflatten(-1, (self._heads, -1)) for x in (query, key_value))
        plain_query, turning = query.split([sizes.plain_dim, sizes.rotary_dim], dim=-1)
        plain_key, value = key_value.split([sizes.plain_dim, sizes.value_dim], dim=-1)
        query = torch.cat([plain_query, rotate(turning, cos, sin)], dim=-1)
        turned_key = rotate(rotary_key, cos, sin).expand(-1, self._heads, -1)
        key = torch.cat([plain_key, turned_key], dim=-1)
        if sizes.value_dim < sizes.head_dim:  # kernels know one size of a head
            value = pad(value, (0, sizes.head_dim - sizes.value_dim))
        out: Tensor = attend(query, key, value, packed=packed, scale=self._scale)
        return out[..., : sizes.value_dim].flatten(1)
