"""What sets a family of models apart from Llama: what config.json says of one, and what holds for all its models."""

from dataclasses import dataclass
from typing import Any, Literal

# Where norms stand: in front of attention and MLP; there and behind them, in front of the residual sum; behind alone.
Norms = Literal["before", "around", "behind"]
LANGUAGE_MODEL, SCORES = "ForCausalLM", "ForSequenceClassification"  # ends of the names of architectures
WRAPPER = "ForConditionalGeneration"  # of a language model with what reads images beside it
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


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
class Family:
    """What config.json of a family says, and what holds for all models of the family. Defaults are Llama's.

    What a missing field means is what transformers makes of it, whose reading vLLM takes.
    """

    name: str
    ffn_key: str = "intermediate_size"
    embedding: str = "model.embed_tokens.weight"  # of the tokens, in a checkpoint
    tied: bool = False  # what a missing tie_word_embeddings means
    head_dim: int | None = None  # what a missing head_dim means; None: hidden_size / heads
    kv_heads: int | None = None  # what a missing num_key_value_heads means; None: as many as heads
    max_positions: int = 2048  # what a missing max_position_embeddings means
    pad_token_id: int | None = None  # what a missing one means
    rope_theta: float = 10000.0  # what a missing one means
    grouped: bool = True  # config.json may give num_key_value_heads and head_dim; else as many as heads, hidden / heads
    norm_eps: float | None = None  # of LayerNorm; None: RMSNorm with rms_norm_eps
    gated: bool = True  # SwiGLU; else ReLU
    linear_bias: bool = False  # of all linear layers in a layer
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    zero_centered_norms: bool = False  # RMSNorm multiplies by 1 + weight
    norms: Norms = "before"
    gelu: bool = False  # the gate of the MLP goes through GELU's approximation by tanh, not SiLU
    wide_qk_norm: bool = False  # RMSNorm over all heads of queries, and of keys
    query_growth: bool = False  # queries grow with their positions: llama_4_scaling_beta says how fast
    scaled_embeddings: bool = False  # by the root of hidden_size, rounded to the model's dtype
    scale_key: str = ""  # of a number whose root divides attention's scores; none: head_dim
    scale_missing: int = 256  # what a missing one means
    qk_norm_key: str = ""  # says whether a model has them; none: as the family
    rotary_part: float = 1  # what a missing partial_rotary_factor means
    rotary_interleaved: bool = False  # neighbouring dimensions turn together, not those of two halves
    position_offset: int = 0  # positions are learned, and position p is row p + offset of their table
    pre_norm_key: str = ""  # says whether the norms stand before attention and MLP; none: they do
    embedding_size_key: str = ""  # the width of the embeddings, where it need not be hidden_size
    expert_keys: tuple[str, ...] = ()  # names of the number of experts; none: no experts
    normalize_router: bool | None = True  # None: norm_topk_prob says it
    normalize_missing: bool = False  # what a missing norm_topk_prob means
    sigmoid_router: bool = False  # float32, with a frozen bias for the choice; else softmax in the weights' dtype
    dense_layers_key: str = ""  # how many of the first layers have no experts, missing: 1; none: no layer
    prediction_layers_key: str = ""  # how many layers that guess further tokens follow; they are left out
    prediction_layers_missing: int = 1  # what a missing number of these means
    prediction_layers_at: str = ""  # what names of their tensors begin with; none: model.layers, behind the others
    shared_experts_key: str = ""  # how many experts every token goes through besides, missing: 1; none: no such expert
    routed_scaling: float = 1.0  # what a missing routed_scaling_factor means
    dense_layers_missing: int = 1  # what a missing `dense_layers_key` means
    latent: bool = False  # keys and values are made of one narrow vector a token (MLA)
    expert_groups: tuple[int, int] | None = None  # missing n_group, topk_group; None: experts are in no groups
    router_in_dtype: bool = False  # the weight of a sigmoid router has the model's dtype; it computes in float32
    block_fp8: bool = False  # published weights may be fp8 with a scale a block, and are read as bfloat16
    delta_nets: bool = False  # some layers are gated delta nets: layer_types says which
    output_gate: bool = False  # a sigmoid of a gate multiplies what a head of attention gives
    model_type: str = ""  # in config.json; none: the family's name
    other_model_types: tuple[str, ...] = ()  # of other makers' models that are built alike
    score_architecture: str = ""  # of a model that scores; none: the family's and ForSequenceClassification
    wrapper: str = ""  # the architecture with what reads images beside, where text_config says what counts
    wrapper_tied: bool = True  # what a missing tie_word_embeddings of the wrapper means
    shared_size_key: str = ""  # the size of an expert that every token goes through, times a sigmoid of a gate
    has_window: bool = False  # sliding_window counts
    window: int | None = None  # what a missing sliding_window means
    window_switch: bool = False  # it counts only with use_sliding_window
    window_interval: int = 0  # every so-manyth layer has no window, unless layer_types says otherwise; 0: see below
    all_have_windows: bool = False  # a window is one in every layer; else it bounds how long sequences may be
    unturned_interval: int = 0  # every so-manyth layer has no rotary embedding, unless no_rope_layers says otherwise
    rope_by_layer: bool = False  # rope_parameters are those of each of layer_types
    rope_kinds: tuple[str, ...] = ()  # of rotary embedding that there may be; none: all that are known
    window_theta_key: str = ""  # the base of layers with windows; none: as other layers
    window_theta: float = 10000.0  # what a missing one means
    missing: tuple[tuple[str, float], ...] = ()  # numbers that config.json may leave out
    rules: tuple[ConfigFieldRule, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """Numbers that config.json must have."""
        experts = ("num_experts_per_tok",) if self.expert_keys else ()
        eps = () if self.norm_eps else ("rms_norm_eps",)
        positions = ("max_position_embeddings",) if self.position_offset else ()
        return (*SIZES, self.ffn_key, "vocab_size", *eps, *positions, *experts)
