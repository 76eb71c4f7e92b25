"""Layers with norms behind attention and MLP, in front of the residual sums, as Gemma 3 and OLMo 3 have them."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

Add = Callable[..., Tensor]  # (output and bias, residual, dropout) -> their sum


class NormsBehindLayer(TransformerLayer):
    """h = x + norm_a(attention(x')), y = h + norm_m(mlp(h')), x' and h' with the norms in front or without.

    megatron-core 0.16.1 has no place for such norms: they are the first that its sums do.
    """

    def __init__(self, config: TransformerConfig, *args: Any, norm: type[nn.Module], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attention_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = _adding_normed(self.post_attention_layernorm, self.self_attn_bda)
        self.mlp_bda = _adding_normed(self.post_mlp_layernorm, self.mlp_bda)


def _adding_normed(norm: nn.Module, choose: Callable[..., Add]) -> Callable[..., Add]:
    """megatron's choice of a sum, with the norm in front of it."""

    def chosen(*given: Any) -> Add:
        add = choose(*given)

        def add_normed(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = output
            assert bias is None, "a bias would be added behind the norm"
            return add((norm(x), None), residual, dropout)

        return add_normed

    return chosen
