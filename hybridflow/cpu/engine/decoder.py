"""Layers of the engine's model, each as one call of a kernel in C where a step has few tokens.

vLLM 0.32.0's Llama, Mistral, Qwen2 and Qwen3, not cut over tensor-parallel ranks. With `sampling.py` a step takes
0.5 to 0.85 of the time (tests.bench.engine_step). What the kernel does not know stays vLLM's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridflow.cpu.engine.kernels import Methods, is_ours, most_rows
from hybridflow.cpu.kernels.decoder import DecoderLayer, Keys, Sizes

PARTS = {  # of a layer: where the weights are, and the kernel's names for them
    "input_layernorm": {"weight": "first_norm"},
    "self_attn.qkv_proj": {"weight": "qkv", "bias": "qkv_bias"},
    "self_attn.q_norm": {"weight": "query_norm"},
    "self_attn.k_norm": {"weight": "key_norm"},
    "self_attn.o_proj": {"weight": "out", "bias": "out_bias"},
    "post_attention_layernorm": {"weight": "second_norm"},
    "mlp.gate_up_proj": {"weight": "gate_up", "bias": "gate_up_bias"},
    "mlp.down_proj": {"weight": "down", "bias": "down_bias"},
}
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Prepared:
    """What of a layer is the same in every step. The memory of the weights is not: a hand-off may move it."""

    layer: DecoderLayer
    parts: tuple[tuple[str, dict[str, Any], str], ...]  # (the kernel's name, parameters of a module, theirs)
    most_rows: int

    def weights(self) -> dict[str, Tensor]:
        return {name: parameters[theirs] for name, parameters, theirs in self.parts}


def decoder_in_c(theirs: type) -> Methods:
    """For a class of vLLM's layers. Each is asked once what it is made of."""
    their_forward = vars(theirs)["forward"]

    def forward(self: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, **others: Any) -> Any:
        if all(other is None for other in others.values()):
            prepared = _prepared(self, hidden_states)
            if prepared and 0 < len(hidden_states) <= prepared.most_rows and (keys := _keys(self.self_attn.attn)):
                rotation = self.self_attn.rotary_emb._match_cos_sin_cache_dtype(hidden_states)
                return prepared.layer(
                    hidden_states, residual, prepared.weights(), positions=positions, rotation=rotation, keys=keys
                )
        return their_forward(self, positions, hidden_states, residual, **others)

    return {"forward": forward}


def repeated(model: Any, rows: int) -> "Callable[[Tensor, int], Tensor] | None":
    """vLLM's forward pass of `model`, for a step as the one before, of `rows` tokens in the same buffers.

    A function of (rows,) token ids and the longest sequence that gives (rows, width); None where a layer was not one
    call.
    """
    from vllm.model_executor.models.llama import LlamaModel
    from vllm.model_executor.models.mistral import MistralModel
    from vllm.model_executor.models.qwen2 import Qwen2Model
    from vllm.model_executor.models.qwen3 import Qwen3Model

    if type(model) not in (LlamaModel, MistralModel, Qwen2Model, Qwen3Model):
        return None
    prepared: list[Prepared | None] = [vars(layer).get("in_c") for layer in model.layers]
    layers = [each.layer for each in prepared if each is not None and rows <= each.most_rows]
    if len(layers) < len(prepared) or any(len(layer.given.x) != rows for layer in layers):
        return None

    def forward(token_ids: Tensor, longest: int) -> Tensor:
        layers[0].given.x.copy_(model.embed_input_ids(token_ids))
        for layer in layers:
            layer.again(longest)
        last = layers[-1].given
        normed: Tensor = model.norm(last.y, last.residual)[0]
        return normed

    return forward


def _prepared(layer: Any, x: Tensor) -> Prepared | None:
    known: dict[str, Prepared | None] = vars(layer)
    if "in_c" not in known:
        known["in_c"] = _prepare(layer, x) if _understood(layer) else None
    return known["in_c"]


def _understood(layer: Any) -> bool:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    attention, rotation = layer.self_attn, layer.self_attn.rotary_emb
    heads = [name for name in NORMS[2:] if _part(layer, name) is not None]
    return (
        getattr(layer, "ada_rms_norm_t_cond", None) is None
        and not getattr(attention, "do_llama_4_scaling", False)
        and len(heads) in (0, 2)
        and all(_plain_norm(part) for name in NORMS if (part := _part(layer, name)) is not None)
        and len({_part(layer, name).variance_epsilon for name in (*NORMS[:2], *heads)}) == 1
        and attention.o_proj.tp_size == 1
        and isinstance(rotation, RotaryEmbedding)
        and type(rotation).forward_cpu is RotaryEmbedding.forward_cpu
        and rotation.is_neox_style
        and attention.attn.query_quant is None
        and not any(hasattr(_part(layer, name), "lora_a") for name in PARTS)
        and attention.attn.kv_sharing_target_layer_name is None
    )


def _plain_norm(norm: Any) -> bool:
    return norm.has_weight and norm.variance_size_override is None


def _prepare(layer: Any, x: Tensor) -> Prepared | None:
    """None where a weight is of another type, or not dense."""
    modules = {name: module for name in PARTS if (module := _part(layer, name)) is not None}
    parts = tuple(
        (ours, vars(module)["_parameters"], theirs)
        for name, module in modules.items()
        for theirs, ours in PARTS[name].items()
        if vars(module)["_parameters"].get(theirs) is not None
    )
    weights = [parameters[theirs] for _, parameters, theirs in parts]
    if not all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights):
        return None
    attention, width, hidden = layer.self_attn.attn, x.shape[1], layer.mlp.down_proj.weight.shape[1]
    sizes = Sizes(
        width=width,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        dims=attention.head_size,
        turning=layer.self_attn.rotary_emb.rotary_dim // 2,
        hidden=hidden,
        eps=layer.input_layernorm.variance_epsilon,
        scale=attention.impl.scale,
    )
    inner = (width, attention.num_heads * attention.head_size, hidden)
    return Prepared(DecoderLayer(sizes, x.dtype), parts, min(most_rows(x.dtype, size) for size in inner))


def _part(layer: Any, path: str) -> Any:
    for name in path.split("."):
        layer = getattr(layer, name, None)
    return layer


def _keys(attention: Any) -> Keys | None:
    """What vLLM says of this step; None where it has no keys, or vLLM's attention writes and reads them."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    about, layer, cache, slots = get_attention_context(attention.layer_name)
    if about is None or slots is None or not is_ours(attention.impl, layer, cache):
        return None
    assert about.causal and about.dynamic_causal is None, "a decoder's attention is causal"
    return Keys(cache, about.block_table, about.query_start_loc, about.seq_lens, slots, longest=about.max_seq_len)
