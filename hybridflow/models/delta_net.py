"""A gated delta net in place of attention, as Qwen3.5 has it in three layers of four (Yang et al. 2024, 2412.06464).

For the hidden states x of a sequence:

    q, k, v = silu(causal convolution of W_qkv x);   z = W_z x;   b = W_b x;   a = W_a x
    o = delta rule of q, k, v with g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b)
    y = W_out (w o / rms(o) silu(z)),  the norm within each head

Axes of tensors, as suffixes: t tokens, g key heads, h value heads, k and v the sizes of their heads.
Key heads are cut over the tensor-parallel ranks, and with each its value heads. `in_proj_qkvz` and `in_proj_ba` are
what vLLM has under these names: of each part this rank's rows, one part below the other. With context parallelism each
of the ranks that share tokens has all tokens of a share of these heads: a state goes from token to token.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from hybridflow.architecture.layer_kinds import DeltaSizes
from hybridflow.models.attention import PackedSequences
from hybridflow.models.context import ContextSpans, exchanged
from hybridflow.models.delta_rule import DeltaRule, Sequences, causal_convolution
from hybridflow.models.layers import HeadNorm
from hybridflow.models.mixer import LinearClasses, Mixer


@dataclass(frozen=True)
class HeadShare:
    """Of a rank's heads: one of `count` neighbouring shares."""

    count: int
    number: int

    def of(self, x: Tensor) -> Tensor:
        return x if self.count == 1 else x.chunk(self.count)[self.number]


ALL = HeadShare(1, 0)


class Convolution(nn.Module):
    """The weight of this rank's channels, (channels, width)."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width, dtype=dtype))


class DeltaNet(Mixer):
    """megatron's `self_attention` of a layer: (tokens, 1, hidden) in and out."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        sizes: DeltaSizes,
        linear: LinearClasses,
        rule: DeltaRule,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        """kwargs: what a layer tells any attention."""
        super().__init__(config, layer_number)
        self._sizes, self._rule = sizes, rule
        ranks, heads, hidden = pg_collection.tp.size(), sizes.value_heads, config.hidden_size
        self.in_proj_qkvz = linear.column_parallel(config, hidden, 2 * sizes.keys + 2 * sizes.values, pg_collection)
        self.in_proj_ba = linear.column_parallel(config, hidden, 2 * heads, pg_collection)
        self._keys, self._values = sizes.keys // ranks, sizes.values // ranks  # of this rank
        self.conv1d = Convolution(2 * self._keys + self._values, sizes.kernel, config.params_dtype)
        self.A_log = nn.Parameter(torch.empty(heads // ranks))
        self.dt_bias = nn.Parameter(torch.empty(heads // ranks, dtype=config.params_dtype))
        self.out_norm = HeadNorm(config, sizes.value_dim, config.layernorm_epsilon)
        self.out_norm.group = pg_collection.tp
        self.out_proj = linear.row_parallel(config, sizes.values, hidden, pg_collection)

    def keep_float32(self) -> None:
        """After a cast: A_log is float32 in any model, here and in the engine."""
        self.A_log.data = self.A_log.data.float()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(packed_seq_params, PackedSequences), "packed sequences alone"
        qkvz, ba = (linear(hidden_states)[0].squeeze(1) for linear in (self.in_proj_qkvz, self.in_proj_ba))
        packed = packed_seq_params

        def core(qkvz: Tensor, ba: Tensor) -> Tensor:
            if packed.context is None:
                return self._mixed(qkvz, ba, packed.sequences, ALL)
            return self._mixed_over_ranks(qkvz, ba, packed.context)

        mixed = self.computed(core, qkvz, ba)
        out: tuple[Tensor, Tensor | None] = self.out_proj(mixed.unsqueeze(1))
        return out

    def _mixed(self, qkvz: Tensor, ba: Tensor, sequences: Sequences, share: HeadShare) -> Tensor:
        """(t, values of the share) of whole sequences, from what the share's heads have of qkvz and ba."""
        keys, values = self._keys // share.count, self._values // share.count
        qkv, z = qkvz.split([2 * keys + values, values], dim=-1)
        conv_weight: Tensor = self.conv1d.weight
        if share.count > 1:
            conv_weight = torch.cat([share.of(x) for x in conv_weight.split([self._keys, self._keys, self._values])])
        qkv_conv = causal_convolution(qkv, conv_weight, sequences)
        q, k, v = qkv_conv.split([keys, keys, values], dim=-1)
        b_th, a_th = ba.float().chunk(2, dim=-1)
        g_th = -share.of(self.A_log).exp() * softplus(a_th + share.of(self.dt_bias).float())
        q_tgk, k_tgk = (x.unflatten(-1, (-1, self._sizes.key_dim)) for x in (q, k))
        v_thv, z_thv = (x.unflatten(-1, (-1, self._sizes.value_dim)) for x in (v, z))
        o_thv = self._rule(q_tgk, k_tgk, v_thv, g_th, b_th.sigmoid(), sequences=sequences)
        gated: Tensor = self.out_norm(o_thv) * silu(z_thv.float())
        return gated.to(o_thv.dtype).flatten(1)

    def _mixed_over_ranks(self, qkvz: Tensor, ba: Tensor, spans: ContextSpans) -> Tensor:
        """Ranks with parts of the sequences each take all tokens of a share of the heads, and give the outputs back."""
        context, widths = spans.context, [2 * self._keys + 2 * self._values, ba.shape[-1]]
        sizes = [self._keys, self._keys, self._values, self._values, ba.shape[-1] // 2, ba.shape[-1] // 2]
        parts = torch.cat([qkvz, ba], dim=-1).split(sizes, dim=-1)
        qkvzba_for_ranks = torch.cat([x.unflatten(-1, (context.size, -1)) for x in parts], dim=-1).transpose(0, 1)
        qkvzba_all_tokens = exchanged(qkvzba_for_ranks, context).flatten(0, 1)[spans.gathered]
        qkvz_all, ba_all = qkvzba_all_tokens.split([width // context.size for width in widths], dim=-1)
        mixed = self._mixed(qkvz_all, ba_all, spans.stretches, HeadShare(context.size, context.rank))
        mixed_for_ranks = mixed.new_zeros(context.size * spans.num_tokens, mixed.shape[-1])
        mixed_for_ranks = mixed_for_ranks.index_copy(0, spans.gathered, mixed).unflatten(0, (context.size, -1))
        return exchanged(mixed_for_ranks, context).transpose(0, 1).flatten(1)
