"""The module of each token mixer in a megatron layer: by the model, the device and what is installed."""

from functools import partial
from typing import TypeVar, assert_never

from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from hybridflow.architecture.layer_kinds import MixerName
from hybridflow.architecture.spec import ModelSpec
from hybridflow.models.attention import AttentionFunctions, GroupedSelfAttention, HeadNorms, PackedAttention
from hybridflow.models.delta_net import DeltaNet
from hybridflow.models.gated_attention import GatedSelfAttention
from hybridflow.models.latent_attention import LatentAttention
from hybridflow.models.layer_classes import attention_functions, delta_rule_function, layer_classes, linear_classes
from hybridflow.models.layers import LayerNorm, ZeroCenteredHeadNorm, ZeroCenteredRMSNorm
from hybridflow.models.recomputation import attention_runs_again
from hybridflow.models.wide_norm import WideHeadNorm
from hybridflow.models.window_attention import UnturnedAttention, WindowAttention

Parts = TypeVar("Parts")


def mixer_module(
    name: MixerName, theirs: ModuleSpec, spec: ModelSpec, config: TransformerConfig, *, engine: bool
) -> ModuleSpec:
    """megatron's `self_attention` of a layer. theirs: attention as megatron makes it. engine: of Transformer Engine."""
    match name:
        case "attention":
            return _attention(theirs, PackedAttention, spec, config, engine=engine)
        case "window":
            return _attention(theirs, WindowAttention, spec, config, engine=engine)
        case "unturned":
            return _attention(theirs, UnturnedAttention, spec, config, engine=engine)
        case "latent":
            return ModuleSpec(
                LatentAttention,
                params={
                    "sizes": spec.latent,
                    "scale": spec.attention_scale,
                    "linear": linear_classes(engine=engine),
                    "norm": layer_classes().rms_norm,
                    "functions": _functions(config, interleaved=True),
                },
            )
        case "delta_net":
            rule, linear = delta_rule_function(config.params_dtype), linear_classes(engine=engine)
            return ModuleSpec(DeltaNet, params={"sizes": spec.delta, "linear": linear, "rule": rule})
    assert_never(name)


def _attention(
    theirs: ModuleSpec, core: type[PackedAttention], spec: ModelSpec, config: TransformerConfig, *, engine: bool
) -> ModuleSpec:
    traits = spec.traits
    theirs.module = layer_classes().self_attention if core is PackedAttention else GroupedSelfAttention
    if traits.attention.gate:
        theirs.module = GatedSelfAttention
    theirs.params = {**theirs.params, "head_norms": _head_norms(spec, engine=engine)}
    window = spec.sliding_window if core is WindowAttention else None
    functions = _functions(config, interleaved=traits.rotation.interleaved, window=window)
    submodules(theirs, SelfAttentionSubmodules).core_attention = ModuleSpec(core, params={"functions": functions})
    return theirs


def _head_norms(spec: ModelSpec, *, engine: bool) -> HeadNorms | None:
    if spec.traits.attention.norms == "all":
        return partial(WideHeadNorm, heads=spec.num_heads), partial(WideHeadNorm, heads=spec.num_kv_heads)
    if not spec.qk_norm:
        return None
    if spec.traits.norms.zero_centered:
        return ZeroCenteredHeadNorm, ZeroCenteredHeadNorm
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm, TENorm
    return norm_class(spec), norm_class(spec)


def norm_class(spec: ModelSpec) -> type[nn.Module]:
    if spec.traits.norms.eps:
        return LayerNorm
    return ZeroCenteredRMSNorm if spec.traits.norms.zero_centered else layer_classes().rms_norm


def _functions(config: TransformerConfig, *, interleaved: bool, window: int | None = None) -> AttentionFunctions:
    backend = "fused" if config.attention_backend is AttnBackend.fused else "flash"
    return attention_functions(
        config.params_dtype,
        interleaved=interleaved,
        backend=backend,
        window=window,
        keep=attention_runs_again(config),
    )


def submodules(spec: object, kind: type[Parts]) -> Parts:
    """Those of a module, which megatron declares as any object. 0.19.2 gives a function that makes an MLP of them."""
    found = spec.keywords.get("submodules") if isinstance(spec, partial) else getattr(spec, "submodules", None)
    assert isinstance(found, kind), f"{spec} has no {kind.__name__}"
    return found
