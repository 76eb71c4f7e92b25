"""What a family of models is composed of, and what config.json says of one. Defaults are Llama's.

The parts say what holds for all models of a family. What a field of config.json means that is not there is in
`missing`: what transformers makes of it, whose reading vLLM takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hybridflow.architecture.layer_kinds import MixerName

LANGUAGE_MODEL, SCORES = "ForCausalLM", "ForSequenceClassification"  # ends of the names of architectures
WRAPPER = "ForConditionalGeneration"  # of a language model with what reads images beside it
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")
POSITIONS = "max_position_embeddings"


@dataclass(frozen=True)
class ConfigFieldRule:
    """A field of config.json that must have one of these values; the first is what a missing field means.

    required: a missing field means a value that is not allowed.
    """

    key: str
    allowed: tuple[Any, ...]
    reason: str
    required: bool = False


@dataclass(frozen=True)
class AttentionTraits:
    """Of queries, keys and values of heads, and of what attention gives."""

    bias: bool = False  # of queries, keys and values
    norms: Literal["", "heads", "all"] = ""  # RMSNorm over each head of queries and keys, or over all heads
    norms_key: str = ""  # says whether a model has norms of heads; none: as the family
    gate: bool = False  # a sigmoid of a gate multiplies what a head gives
    fused: bool = False  # one tensor of the files has queries, keys and values
    last: Literal["", "bias", "norms"] = (
        ""  # of the mixer's weights, what stands behind the MLP's in messages and exported files
    )
    grouped: bool = True  # config.json may give num_key_value_heads and head_dim; else as many as heads, hidden / heads
    scale_key: str = ""  # of a number whose root divides scores; none: head_dim
    grows: bool = False  # queries grow with their positions: llama_4_scaling_beta says how fast


@dataclass(frozen=True)
class RotationTraits:
    """Of rotary embedding."""

    interleaved: bool = False  # neighbouring dimensions turn together, not those of two halves
    kinds: tuple[str, ...] = ()  # that there may be; none: all that are known
    by_layer: bool = False  # rope_parameters are those of each of layer_types
    window_theta_key: str = ""  # the base of layers with windows; none: as other layers
    window_theta: float = 10000.0  # what a missing one means


@dataclass(frozen=True)
class WindowTraits:
    """Of sliding_window. layers: which have the window; none: it bounds how long sequences may be."""

    layers: Literal["", "all", "layer_types"] = ""
    switch: bool = False  # it counts only with use_sliding_window


@dataclass(frozen=True)
class MlpTraits:
    """Of dense MLPs, and of experts."""

    size_key: str = "intermediate_size"  # of experts where there are any
    activation: Literal["swiglu", "geglu", "relu"] = "swiglu"  # GELU is approximated by tanh
    fused: Literal["", "gated", "rows"] = ""  # one tensor of the files has gate and up; how the engine splits it

    @property
    def gated(self) -> bool:
        return self.activation != "relu"


@dataclass(frozen=True)
class ExpertTraits:
    """Of a mixture of experts."""

    count_keys: tuple[str, ...]  # names of the number of experts
    names: Literal["mlp", "mixtral"] = "mlp"  # of its tensors
    normalizes: bool | None = True  # the weights of a token's experts sum to 1; None: norm_topk_prob says it
    sigmoid: bool = False  # router: float32, with a frozen bias for the choice; else softmax in the weights' dtype
    router_in_dtype: bool = False  # the weight of a sigmoid router has the model's dtype; it computes in float32
    in_groups: bool = False  # n_group and topk_group say of which groups a token's experts are
    dense_layers_key: str = ""  # how many of the first layers have no experts; none: no layer
    shared_count_key: str = ""  # how many experts every token goes through besides; none: no such expert
    shared_size_key: str = ""  # the size of such an expert, times a sigmoid of a gate


@dataclass(frozen=True)
class NormTraits:
    """place: in front of attention and MLP; there and behind them, in front of the residual sum; behind alone."""

    place: Literal["before", "around", "behind"] = "before"
    eps: float | None = None  # of LayerNorm; None: RMSNorm with rms_norm_eps
    zero_centered: bool = False  # RMSNorm multiplies by 1 + weight
    before_key: str = ""  # says whether the norms stand before attention and MLP; none: they do


@dataclass(frozen=True)
class EmbeddingTraits:
    name: str = "model.embed_tokens.weight"  # of the tokens, in a checkpoint
    size_key: str = ""  # its width, where that need not be hidden_size
    scaled: bool = False  # by the root of hidden_size, rounded to the model's dtype
    position_offset: int = 0  # positions are learned, and position p is row p + offset of their table


@dataclass(frozen=True)
class PredictionTraits:
    """Of layers that guess further tokens, which are left out."""

    key: str = ""  # how many there are; none: there are none
    at: str = ""  # what names of their tensors begin with; none: model.layers, behind the others


@dataclass(frozen=True)
class Family:
    """A composition: layers of a mixer and an MLP with norms, between an embedding and a head."""

    name: str
    mixer: MixerName = "attention"  # of all layers; of some layers delta_net and unturned; windows: see there
    attention: AttentionTraits = AttentionTraits()
    rotation: RotationTraits = RotationTraits()
    windows: WindowTraits | None = None
    mlp: MlpTraits = MlpTraits()
    experts: ExpertTraits | None = None
    norms: NormTraits = NormTraits()
    embedding: EmbeddingTraits = EmbeddingTraits()
    prediction: PredictionTraits = PredictionTraits()
    linear_bias: bool = False  # of all linear layers in a layer, under OPT's names
    block_fp8: bool = False  # published weights may be fp8 with a scale a block, and are read as bfloat16
    model_type: str = ""  # in config.json; none: the family's name
    other_model_types: tuple[str, ...] = ()  # of other makers' models that are built alike
    score_architecture: str = ""  # of a model that scores; none: the family's and ForSequenceClassification
    wrapper: str = ""  # the architecture with what reads images beside, where text_config says what counts
    wrapper_tied: bool = True  # what a missing tie_word_embeddings of the wrapper means
    missing: Mapping[str, Any] = field(default_factory=dict)  # field of config.json -> what a missing one means
    rules: tuple[ConfigFieldRule, ...] = ()

    def default(self, key: str) -> Any:
        """What a missing field means; None: nothing, or what other fields say."""
        return self.missing.get(key, MISSING.get(key))

    @property
    def required(self) -> tuple[str, ...]:
        """Numbers that config.json must have."""
        experts = ("num_experts_per_tok",) if self.experts else ()
        eps = () if self.norms.eps else ("rms_norm_eps",)
        positions = (POSITIONS,) if self.embedding.position_offset else ()
        return (*SIZES, self.mlp.size_key, "vocab_size", *eps, *positions, *experts)


# Of all families that say nothing else. Null is another thing: it means what the reader of the field makes of it.
MISSING: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    POSITIONS: 2048,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1,
    "query_pre_attn_scalar": 256,
    "no_rope_layer_interval": 4,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
