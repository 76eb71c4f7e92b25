"""Embeddings that are multiplied by the root of the hidden size, as Gemma has them."""

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import not_none
from torch import Tensor
from torch.distributed import ProcessGroup


class ScaledEmbedding(VocabParallelEmbedding):
    """sqrt(hidden_size) E[token], the root rounded to the weights' dtype. The output layer reads E itself."""

    def __init__(self, config: TransformerConfig, vocab_size: int, tp_group: ProcessGroup, *, scatters: bool) -> None:
        """scatters: to the tokens of each rank, as megatron has it with sequence parallelism."""
        super().__init__(
            vocab_size,
            config.hidden_size,
            init_method=not_none(config.embedding_init_method),
            reduce_scatter_embeddings=scatters,
            config=config,
            tp_group=tp_group,
        )
        self.scale = float(torch.tensor(config.hidden_size**0.5, dtype=config.params_dtype))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = super().forward(input_ids) * self.scale
        return hidden
