"""Of which classes megatron's layers are made: by the model, the device and what is installed.

megatron's own local layers, or Transformer Engine's, with our norms, activations, attention and experts in them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn

from hybridflow.architecture.family import Family
from hybridflow.architecture.layer_kinds import LayerKind, Mixer
from hybridflow.architecture.spec import ModelSpec
from hybridflow.config.recompute import Recompute
from hybridflow.models.attention import AttentionFunctions, GroupedSelfAttention, HeadNorms, PackedAttention
from hybridflow.models.delta_net import DeltaNet
from hybridflow.models.experts import MixtureOfExperts, NarrowSigmoidRouter, Router, SigmoidRouter
from hybridflow.models.gated_attention import GatedSelfAttention
from hybridflow.models.latent_attention import LatentAttention
from hybridflow.models.layer_classes import (
    attention_functions,
    delta_rule_function,
    device_arguments,
    expert_kernels,
    has_transformer_engine,
    layer_classes,
    linear_classes,
)
from hybridflow.models.layers import GeGLU, LayerNorm, ReLU, ZeroCenteredHeadNorm, ZeroCenteredRMSNorm
from hybridflow.models.norms_behind import NormsBehindLayer
from hybridflow.models.opt import PostNormLayer
from hybridflow.models.recomputation import add_own_modules, attention_runs_again, megatron_arguments, runs_again
from hybridflow.models.wide_norm import WideHeadNorm
from hybridflow.models.window_attention import UnturnedAttention, WindowAttention
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import Place

Parts = TypeVar("Parts")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CORE_ATTENTION: dict[Mixer, type[PackedAttention]] = {
    "attention": PackedAttention,
    "window": WindowAttention,
    "unturned": UnturnedAttention,
}


def transformer_config(
    spec: ModelSpec,
    grid: Grid,
    *,
    dtype: str,
    sequence_parallel: bool,
    recompute: Recompute,
    arguments: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """arguments: of megatron's that a config gives, in place of ours."""
    traits = spec.traits
    ours: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.mlp_size("dense") or spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="LayerNorm" if traits.norm_eps else "RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=traits.gated,
        activation_func=_activation(traits),
        add_bias_linear=traits.linear_bias,
        add_qkv_bias=traits.qkv_bias,
        qk_layernorm=spec.qk_norm and not traits.zero_centered_norms,  # those whose gradients megatron sums over ranks
        layernorm_zero_centered_gamma=traits.zero_centered_norms,
        attention_output_gate=traits.output_gate,
        rotary_interleaved=traits.rotary_interleaved,
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
        **device_arguments(engine=_has_engine_layers(spec), gated=traits.gated),
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
    if traits.gelu:
        return nn.functional.gelu
    return nn.functional.silu if traits.gated else nn.functional.relu


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
    norm = _norm_class(spec)
    kinds = [spec.layer_kind(layer) for layer in layers]
    by_kind = {kind: _layer_spec(spec, kind, norm, config, place) for kind in dict.fromkeys(kinds)}
    final = None if spec.post_norm else ModuleSpec(norm)
    return TransformerBlockSubmodules(layer_specs=[by_kind[kind] for kind in kinds], layer_norm=final)


def _norm_class(spec: ModelSpec) -> type[nn.Module]:
    if spec.traits.norm_eps:
        return LayerNorm
    return ZeroCenteredRMSNorm if spec.traits.zero_centered_norms else layer_classes().rms_norm


def _has_engine_layers(spec: ModelSpec) -> bool:
    """Transformer Engine's, which have a norm in front of every linear layer."""
    return has_transformer_engine() and not spec.post_norm and spec.traits.norms != "behind"


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
    parts = _submodules(layer, TransformerLayerSubmodules)
    if traits.norms != "before":
        layer.module, layer.params = NormsBehindLayer, {**layer.params, "norm": norm}
        if traits.norms == "behind":
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    elif norm is classes.rms_norm:
        layer.module = classes.layer_of_rms_norms
    if spec.post_norm:
        layer.module, parts.input_layernorm, parts.pre_mlp_layernorm = PostNormLayer, IdentityOp, IdentityOp
    if kind.mlp == "experts":
        sigmoid = NarrowSigmoidRouter if traits.router_in_dtype else SigmoidRouter
        router = sigmoid if traits.sigmoid_router else Router
        kernels = expert_kernels(kept=not (config.recompute_granularity == "full" or runs_again(config, "moe")))
        kind_of = {"router": router, "shared_size": spec.shared_ffn_hidden_size, "gated": bool(traits.shared_size_key)}
        made_of = {"swiglu": classes.swiglu.function, "kernels": kernels, "place": place}
        parts.mlp = ModuleSpec(MixtureOfExperts, params={**made_of, **kind_of})
    if kind.mixer == "delta_net":
        assert spec.delta is not None, "a layer that is a gated delta net has sizes"
        linear = linear_classes(engine=_has_engine_layers(spec))
        rule = delta_rule_function(config.params_dtype)
        parts.input_layernorm = norm
        parts.self_attention = ModuleSpec(DeltaNet, params={"sizes": spec.delta, "linear": linear, "rule": rule})
        return layer
    if kind.mixer == "latent":
        parts.input_layernorm = norm
        parts.self_attention = _latent_attention(spec, config)
        return layer
    assert isinstance(parts.self_attention, ModuleSpec)
    attention = _submodules(parts.self_attention, SelfAttentionSubmodules)
    parts.self_attention.module = classes.self_attention if kind.mixer == "attention" else GroupedSelfAttention
    if traits.output_gate:
        parts.self_attention.module = GatedSelfAttention
    parts.self_attention.params = {**parts.self_attention.params, "head_norms": _head_norms(spec, norm)}
    window = spec.sliding_window if kind.mixer == "window" else None
    functions = _attention_functions(config, interleaved=traits.rotary_interleaved, window=window)
    attention.core_attention = ModuleSpec(CORE_ATTENTION[kind.mixer], params={"functions": functions})
    return layer


def _head_norms(spec: ModelSpec, norm: type[nn.Module]) -> HeadNorms | None:
    if spec.traits.wide_qk_norm:
        return partial(WideHeadNorm, heads=spec.num_heads), partial(WideHeadNorm, heads=spec.num_kv_heads)
    if not spec.qk_norm:
        return None
    if spec.traits.zero_centered_norms:
        return ZeroCenteredHeadNorm, ZeroCenteredHeadNorm
    if _has_engine_layers(spec):
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm, TENorm
    return norm, norm


def _activation_class(traits: Family) -> type[nn.Module]:
    if traits.gelu:
        return GeGLU
    return layer_classes().swiglu if traits.gated else ReLU


def _latent_attention(spec: ModelSpec, config: TransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        LatentAttention,
        params={
            "sizes": spec.latent,
            "scale": spec.attention_scale,
            "linear": linear_classes(engine=_has_engine_layers(spec)),
            "norm": layer_classes().rms_norm,
            "functions": _attention_functions(config, interleaved=True),
        },
    )


def _attention_functions(
    config: TransformerConfig, *, interleaved: bool, window: int | None = None
) -> AttentionFunctions:
    backend = "fused" if config.attention_backend is AttnBackend.fused else "flash"
    return attention_functions(
        config.params_dtype,
        interleaved=interleaved,
        backend=backend,
        window=window,
        keep=attention_runs_again(config),
    )


def _take_norms_out(layer: ModuleSpec, norm: type[nn.Module], *, has_mlp: bool) -> None:
    """Of Transformer Engine's linear layers, which keep what a norm gives to themselves: adapters read it, and what is
    computed again is dropped."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear as linear

    parts = _submodules(layer, TransformerLayerSubmodules)
    parts.input_layernorm = norm
    _submodules(parts.self_attention, SelfAttentionSubmodules).linear_qkv = linear
    if has_mlp:
        parts.pre_mlp_layernorm = norm
        _submodules(parts.mlp, MLPSubmodules).linear_fc1 = linear


def _name_local_layers(layer: ModuleSpec, norm: type[nn.Module], activation: type[nn.Module]) -> None:
    parts = _submodules(layer, TransformerLayerSubmodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    _submodules(parts.mlp, MLPSubmodules).activation_func = activation


def _submodules(spec: object, kind: type[Parts]) -> Parts:
    """Those of a module, which megatron declares as any object. 0.19.2 gives a function that makes an MLP of them."""
    found = spec.keywords.get("submodules") if isinstance(spec, partial) else getattr(spec, "submodules", None)
    assert isinstance(found, kind), f"{spec} has no {kind.__name__}"
    return found
