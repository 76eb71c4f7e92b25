"""The module of each token mixer in a megatron layer: by the model, the device and what is installed.

`GatedSelfAttention` multiplies outputs by sigmoids of a gate (Qwen3.5).
"""

from functools import partial
from typing import Any, TypeVar, assert_never

from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.typed_torch import apply_module, not_none
from torch import Tensor, nn

from hybridflow.architecture.layer_kinds import MixerName
from hybridflow.architecture.spec import ModelSpec
from hybridflow.models.attention import AttentionFunctions, GroupedSelfAttention, HeadNorms, PackedAttention
from hybridflow.models.delta_net import DeltaNet
from hybridflow.models.latent_attention import LatentAttention
from hybridflow.models.layer_classes import attention_functions, delta_rule_function, layer_classes, linear_classes
from hybridflow.models.layers import LayerNorm, WideHeadNorm, ZeroCenteredHeadNorm, ZeroCenteredRMSNorm
from hybridflow.models.recomputation import attention_runs_again
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
