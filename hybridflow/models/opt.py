"""What single models of OPT have and other models have not: opt-350m has both.

Norms that follow the residual sums, so that no norm follows the last layer, and embeddings of another width than the
hidden states, with a matrix that leads in and one that leads out again.
"""

from typing import Any

from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridflow.models.layers import LayerNorm


class PostNormLayer(TransformerLayer):
    """h = norm(x + attention(x)), y = norm'(h + mlp(h)) (Vaswani et al. 2017).

    megatron-core 0.16.1 computes x + attention(norm(x)) and h + mlp(norm'(h)): with norms that do nothing in their
    places, those after the sums are all that is added.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm = LayerNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = LayerNorm(config, config.hidden_size, config.layernorm_epsilon)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        hidden, context = super()._forward_attention(*args, **kwargs)
        return self.post_attention_layernorm(hidden), context

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = self.post_mlp_layernorm(super()._forward_mlp(*args, **kwargs))
        return hidden


class ProjectedEmbedding(VocabParallelEmbedding):
    """Tokens to embeddings of `size`, and these to the hidden size; every tensor-parallel rank projects all of them."""

    def __init__(self, config: TransformerConfig, vocab_size: int, size: int, tp_group: ProcessGroup) -> None:
        super().__init__(
            vocab_size, size, init_method=not_none(config.embedding_init_method), config=config, tp_group=tp_group
        )
        self.project_in = nn.Linear(size, config.hidden_size, bias=False, dtype=config.params_dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.project_in(super().forward(input_ids))
        return hidden
