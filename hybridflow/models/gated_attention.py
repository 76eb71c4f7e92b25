"""Self-attention whose outputs are multiplied by sigmoids of a gate, as in Qwen3.5's layers of full attention."""

from typing import Any

from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module, not_none
from torch import Tensor

from hybridflow.models.attention import GroupedSelfAttention, HeadNorms


class GatedSelfAttention(GroupedSelfAttention):
    """megatron's, with the gate of each head behind the head's query, as HuggingFace and vLLM have them.

    Rows of `linear_qkv`: of each key/value group [query and gate of the first head; of the second; ...; key; value].
    megatron has all queries of a group in front of the gates.
    """

    def __init__(self, config: TransformerConfig, *args: Any, head_norms: HeadNorms, **kwargs: Any) -> None:
        assert config.attention_output_gate, "without it megatron makes no room for gates"
        SelfAttention.__init__(self, config, *args, **kwargs)
        self._make_head_norms(head_norms)

    def get_query_key_value_tensors(  # type: ignore[override]  # a fourth tensor, which megatron asks for
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = True,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """query and gate (t, 1, heads / tp, head_dim), key and value (t, 1, their heads here, head_dim)."""
        assert output_gate and split_qkv, "the gate is cut off the queries"
        group, num_groups = self.pg_collection.tp, not_none(self.config.num_query_groups)
        sharing, heads = group.size() // num_groups, self.config.num_attention_heads // group.size()
        rows, _ = apply_module(self.linear_qkv)(hidden_states)
        if sharing > 1:  # this rank has an even share of a group's rows
            rows = all_gather_last_dim_from_tensor_parallel_region(rows, group=group)
        groups = rows.unflatten(
            -1, (-1, 2 * self.config.num_attention_heads // num_groups + 2, not_none(self.config.kv_channels))
        )
        if sharing > 1:
            own, member = divmod(group.rank(), sharing)
            groups = groups[:, :, own : own + 1]
        both, key, value = groups.split([groups.shape[3] - 2, 1, 1], dim=3)
        both = both.flatten(2, 3)
        if sharing > 1:
            both = both[:, :, 2 * member * heads : 2 * (member + 1) * heads]
        query, gate = both.unflatten(2, (-1, 2)).unbind(3)
        query, key = not_none(self.q_layernorm)(query), not_none(self.k_layernorm)(key.squeeze(3))
        return query, key, value.squeeze(3), gate
