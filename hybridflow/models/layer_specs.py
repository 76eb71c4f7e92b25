"""Of which classes megatron's layers are made: by the model, the device and what is installed.

megatron's own local layers, or Transformer Engine's, with our norms, activations, attention and experts in them.

Gemma 3 and OLMo 3 have norms behind attention and MLP, in front of the residual sums. opt-350m alone has norms that
follow the residual sums, and embeddings of another width than the hidden states, with a matrix on either side.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.typed_torch import not_none
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hybridflow.architecture.family import Family
from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.mixers.known import MIXERS
from hybridflow.architecture.spec import ModelSpec
from hybridflow.config.recompute import Recompute
from hybridflow.models.experts import MixtureOfExperts, NarrowSigmoidRouter, Router, SigmoidRouter
from hybridflow.models.layer_classes import (
    device_arguments,
    expert_kernels,
    has_transformer_engine,
    layer_classes,
)
from hybridflow.models.layers import GeGLU, LayerNorm, ReLU
from hybridflow.models.mixer_modules import mixer_module, norm_class, submodules
from hybridflow.models.recomputation import add_own_modules, megatron_arguments, runs_again
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import Place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    spec: ModelSpec,
    grid: Grid,
    *,
    dtype: str,
    sequence_parallel: bool,
    recompute: Recompute,
    arguments: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """megatron's config of this model on this grid. arguments: the user's, which override ours."""
    traits = spec.traits
    ours: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.mlp_size("dense") or spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="LayerNorm" if traits.norms.eps else "RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=traits.mlp.gated,
        activation_func=_activation(traits),
        add_bias_linear=traits.linear_bias,
        add_qkv_bias=traits.attention.bias,
        qk_layernorm=spec.qk_norm and not traits.norms.zero_centered,  # those whose gradients megatron sums over ranks
        layernorm_zero_centered_gamma=traits.norms.zero_centered,
        attention_output_gate=traits.attention.gate,
        rotary_interleaved=traits.rotation.interleaved,
        softmax_scale=spec.given_scale,
        **(_expert_config(spec) if spec.num_experts else {}),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.layout.vpp if grid.layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=grid.layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=grid.layout.last_stage_layers,
        sequence_parallel=sequence_parallel,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=dtype == "bfloat16",
        perform_initialization=False,  # every weight is loaded
        calculate_per_token_loss=True,  # losses arrive normalised: no division by micro-batches or replicas
        **device_arguments(engine=_has_engine_layers(spec), gated=traits.mlp.gated),
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,  # what a stage has sent on it need not keep
        variable_seq_lengths=grid.pp > 1,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall" if grid.pp > 1 else "allgather",  # else it refuses varying lengths
        **megatron_arguments(recompute),
    )
    theirs = dict(arguments or {})
    if "attention_backend" in theirs:
        theirs["attention_backend"] = AttnBackend[theirs["attention_backend"]]
    config = TransformerConfig(**{**ours, **theirs})
    add_own_modules(config, recompute)
    return config


def _activation(traits: Family) -> Callable[..., Tensor]:
    """Of gates where there are any; megatron's fused GELU is the approximation by tanh."""
    if traits.mlp.activation == "geglu":
        return nn.functional.gelu
    return nn.functional.silu if traits.mlp.gated else nn.functional.relu


def _expert_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_moe_experts": spec.num_experts,
        "moe_router_topk": spec.experts_per_token,
        "moe_router_pre_softmax": True,
        "moe_ffn_hidden_size": spec.ffn_hidden_size,
    }


def block_spec(
    spec: ModelSpec, layers: tuple[int, ...], config: TransformerConfig, place: Place
) -> TransformerBlockSubmodules:
    """place: which part of the experts this rank has."""
    norm = norm_class(spec)
    kinds = [spec.layer_kind(layer) for layer in layers]
    by_kind = {kind: _layer_spec(spec, kind, norm, config, place) for kind in dict.fromkeys(kinds)}
    final = None if spec.post_norm else ModuleSpec(norm)
    return TransformerBlockSubmodules(layer_specs=[by_kind[kind] for kind in kinds], layer_norm=final)


def _has_engine_layers(spec: ModelSpec) -> bool:
    """Transformer Engine's, which have a norm in front of every linear layer."""
    return has_transformer_engine() and spec.has_norms_in_front


def _layer_spec(
    spec: ModelSpec, kind: LayerKind, norm: type[nn.Module], config: TransformerConfig, place: Place
) -> ModuleSpec:
    traits, classes = spec.traits, layer_classes()
    layer: ModuleSpec
    if _has_engine_layers(spec):
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=spec.num_experts if kind.mlp == "experts" else None
        )
        if spec.lora is not None or runs_again(config, "layernorm"):
            _take_norms_out(layer, norm, has_mlp=kind.mlp == "dense")
    else:
        layer = get_gpt_layer_local_spec()
        _name_local_layers(layer, norm, _activation_class(traits))
    parts = submodules(layer, TransformerLayerSubmodules)
    if traits.norms.place != "before":
        layer.module, layer.params = NormsBehindLayer, {**layer.params, "norm": norm}
        if traits.norms.place == "behind":
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    elif norm is classes.rms_norm:
        layer.module = classes.layer_of_rms_norms
    if spec.post_norm:
        layer.module, parts.input_layernorm, parts.pre_mlp_layernorm = PostNormLayer, IdentityOp, IdentityOp
    if kind.mlp == "experts":
        parts.mlp = _mixture(spec, config, place)
    if not MIXERS[kind.mixer].fuses_norm:
        parts.input_layernorm = norm
    assert isinstance(parts.self_attention, ModuleSpec)
    parts.self_attention = mixer_module(kind.mixer, parts.self_attention, spec, config, engine=_has_engine_layers(spec))
    return layer


def _mixture(spec: ModelSpec, config: TransformerConfig, place: Place) -> ModuleSpec:
    traits = spec.traits.experts
    assert traits is not None, "a layer with experts is of a family with experts"
    sigmoid = NarrowSigmoidRouter if traits.router_in_dtype else SigmoidRouter
    return ModuleSpec(
        MixtureOfExperts,
        params={
            "swiglu": layer_classes().swiglu.function,
            "kernels": expert_kernels(kept=not (config.recompute_granularity == "full" or runs_again(config, "moe"))),
            "place": place,
            "router": sigmoid if traits.sigmoid else Router,
            "shared_size": spec.shared_ffn_hidden_size,
            "gated": bool(traits.shared_size_key),
        },
    )


def _activation_class(traits: Family) -> type[nn.Module]:
    if traits.mlp.activation == "geglu":
        return GeGLU
    return layer_classes().swiglu if traits.mlp.gated else ReLU


def _take_norms_out(layer: ModuleSpec, norm: type[nn.Module], *, has_mlp: bool) -> None:
    """Of Transformer Engine's linear layers, which keep what a norm gives to themselves: adapters read it, and what is
    computed again is dropped."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as linear

    parts = submodules(layer, TransformerLayerSubmodules)
    parts.input_layernorm = norm
    submodules(parts.self_attention, SelfAttentionSubmodules).linear_qkv = linear
    if has_mlp:
        parts.pre_mlp_layernorm = norm
        submodules(parts.mlp, MLPSubmodules).linear_fc1 = linear


def _name_local_layers(layer: ModuleSpec, norm: type[nn.Module], activation: type[nn.Module]) -> None:
    parts = submodules(layer, TransformerLayerSubmodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    submodules(parts.mlp, MLPSubmodules).activation_func = activation


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
