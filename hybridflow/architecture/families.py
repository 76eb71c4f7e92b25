"""The families of models, by the prefix of their architectures at HuggingFace: what sets each apart from Llama."""

from dataclasses import dataclass
from typing import Any

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
    has_wrapper: bool = False  # published models lie in one with what reads images: text_config says what counts
    shared_size_key: str = ""  # the size of an expert that every token goes through, times a sigmoid of a gate
    has_window: bool = False  # sliding_window counts
    window: int | None = None  # what a missing sliding_window means
    window_switch: bool = False  # it counts only with use_sliding_window
    rules: tuple[ConfigFieldRule, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """Numbers that config.json must have."""
        experts = ("num_experts_per_tok",) if self.expert_keys else ()
        eps = () if self.norm_eps else ("rms_norm_eps",)
        positions = ("max_position_embeddings",) if self.position_offset else ()
        return (*SIZES, self.ffn_key, "vocab_size", *eps, *positions, *experts)


SILU = ConfigFieldRule("hidden_act", ("silu",), "must be silu")
NO_ATTENTION_BIAS = ConfigFieldRule(
    "attention_bias", (False, None), "biases of attention are not supported in this family"
)

QWEN35_RULES = (
    ConfigFieldRule("attn_output_gate", (True,), "attention without an output gate is not supported"),
    ConfigFieldRule("output_gate_type", ("silu", "swish"), "must be silu"),
    ConfigFieldRule("layer_scale", (False, None), "scales of layers are not supported"),
)

LATENT_RULES = (
    SILU,
    NO_ATTENTION_BIAS,
    ConfigFieldRule("index_topk", (None,), "sparse attention, which looks at a choice of the keys, is not supported"),
    ConfigFieldRule("rope_interleave", (True, None), "vLLM turns neighbouring dimensions alone"),
    ConfigFieldRule("topk_method", ("noaux_tc",), "the choice of experts must be by sigmoids with a bias"),
    ConfigFieldRule("scoring_func", ("sigmoid",), "the choice of experts must be by sigmoids with a bias"),
    ConfigFieldRule("moe_layer_freq", (1, None), "dense layers among layers of experts are not supported"),
)
# Of families that are near a known one: why a model of theirs is refused.
REFUSED = {
    "DeepseekV2ForCausalLM": "its router is a softmax over groups of experts, which is not supported",
    "DeepseekV32ForCausalLM": "sparse attention, which looks at a choice of the keys, is not supported",
    "GlmMoeDsaForCausalLM": "sparse attention, which looks at a choice of the keys, is not supported",
}

FAMILIES = {
    "Llama": Family(
        "llama",
        rules=(
            SILU,
            ConfigFieldRule("attention_bias", (False, None), "biases of Llama are not supported"),
            ConfigFieldRule("mlp_bias", (False, None), "biases of Llama are not supported"),
        ),
    ),
    "Mistral": Family("mistral", kv_heads=8, max_positions=131072, has_window=True, window=4096, rules=(SILU,)),
    "Qwen2": Family(
        "qwen2",
        kv_heads=32,
        max_positions=32768,
        qkv_bias=True,
        has_window=True,
        window=4096,
        window_switch=True,
        rules=(SILU,),
    ),
    "Qwen3": Family(
        "qwen3",
        head_dim=128,
        kv_heads=32,
        max_positions=32768,
        qk_norm=True,
        has_window=True,
        window=4096,
        window_switch=True,
        rules=(SILU, NO_ATTENTION_BIAS),
    ),
    "Qwen3_5": Family(
        "qwen3_5",
        model_type="qwen3_5_text",
        score_architecture="Qwen3_5TextForSequenceClassification",
        has_wrapper=True,
        head_dim=256,
        kv_heads=4,
        max_positions=32768,
        qk_norm=True,
        zero_centered_norms=True,
        rotary_part=0.25,
        delta_nets=True,
        output_gate=True,
        prediction_layers_key="mtp_num_hidden_layers",
        prediction_layers_missing=0,
        prediction_layers_at="mtp.",
        rules=(SILU, NO_ATTENTION_BIAS, *QWEN35_RULES),
    ),
    "Qwen3_5Moe": Family(
        "qwen3_5_moe",
        model_type="qwen3_5_moe_text",
        has_wrapper=True,
        ffn_key="moe_intermediate_size",
        head_dim=256,
        kv_heads=2,
        max_positions=32768,
        qk_norm=True,
        zero_centered_norms=True,
        rotary_part=0.25,
        delta_nets=True,
        output_gate=True,
        expert_keys=("num_experts", "num_local_experts"),
        shared_size_key="shared_expert_intermediate_size",
        prediction_layers_key="mtp_num_hidden_layers",
        prediction_layers_missing=0,
        prediction_layers_at="mtp.",
        rules=(
            SILU,
            NO_ATTENTION_BIAS,
            *QWEN35_RULES,
            ConfigFieldRule("decoder_sparse_step", (1,), "dense layers among layers of experts are not supported"),
            ConfigFieldRule("mlp_only_layers", (None, []), "dense layers among layers of experts are not supported"),
        ),
    ),
    "Glm": Family(
        "glm",
        head_dim=128,
        kv_heads=2,
        max_positions=131072,
        pad_token_id=151329,
        qkv_bias=True,
        rotary_part=0.5,
        rotary_interleaved=True,
        rules=(SILU, ConfigFieldRule("attention_bias", (True,), "GLM-4 has biases of queries, keys and values")),
    ),
    "OPT": Family(
        "opt",
        ffn_key="ffn_dim",
        embedding="model.decoder.embed_tokens.weight",
        tied=True,
        pad_token_id=1,
        grouped=False,
        norm_eps=1e-5,
        gated=False,
        linear_bias=True,
        qkv_bias=True,
        position_offset=2,
        pre_norm_key="do_layer_norm_before",
        embedding_size_key="word_embed_proj_dim",
        rules=(
            ConfigFieldRule("_remove_final_layer_norm", (False,), "the norm after the last layer is needed"),
            ConfigFieldRule("activation_function", ("relu",), "must be relu"),
            ConfigFieldRule("enable_bias", (True,), "linear layers without biases are not supported"),
            ConfigFieldRule("layer_norm_elementwise_affine", (True,), "norms without weights are not supported"),
        ),
    ),
    "Mixtral": Family(
        "mixtral",
        kv_heads=8,
        max_positions=131072,
        rope_theta=1e6,
        expert_keys=("num_local_experts",),
        has_window=True,
        rules=(SILU,),
    ),
    "Qwen3Moe": Family(
        "qwen3_moe",
        ffn_key="moe_intermediate_size",
        kv_heads=4,
        max_positions=32768,
        qk_norm=True,
        expert_keys=("num_experts", "num_local_experts"),
        normalize_router=None,
        has_window=True,
        window=4096,
        window_switch=True,
        rules=(
            SILU,
            NO_ATTENTION_BIAS,
            ConfigFieldRule("decoder_sparse_step", (1,), "dense layers among layers of experts are not supported"),
            ConfigFieldRule("mlp_only_layers", (None, []), "dense layers among layers of experts are not supported"),
        ),
    ),
    "Glm4Moe": Family(
        "glm4_moe",
        ffn_key="moe_intermediate_size",
        kv_heads=8,
        max_positions=131072,
        qkv_bias=True,
        qk_norm_key="use_qk_norm",
        rotary_part=0.5,
        expert_keys=("n_routed_experts", "num_local_experts"),
        normalize_router=None,
        normalize_missing=True,
        sigmoid_router=True,
        dense_layers_key="first_k_dense_replace",
        shared_experts_key="n_shared_experts",
        prediction_layers_key="num_nextn_predict_layers",
        rules=(
            SILU,
            ConfigFieldRule("attention_bias", (True,), "GLM-4.5 has biases of queries, keys and values", required=True),
            ConfigFieldRule("n_group", (1, None), "experts in groups are not supported"),
            ConfigFieldRule("topk_group", (1, None), "experts in groups are not supported"),
        ),
    ),
    "Glm4MoeLite": Family(
        "glm4_moe_lite",
        ffn_key="moe_intermediate_size",
        grouped=False,
        kv_heads=20,
        max_positions=202752,
        routed_scaling=1.8,
        expert_keys=("n_routed_experts", "num_local_experts"),
        normalize_router=None,
        normalize_missing=True,
        sigmoid_router=True,
        dense_layers_key="first_k_dense_replace",
        shared_experts_key="n_shared_experts",
        prediction_layers_key="num_nextn_predict_layers",
        latent=True,
        expert_groups=(1, 1),
        rules=LATENT_RULES,
    ),
    "DeepseekV3": Family(
        "deepseek_v3",
        other_model_types=("kimi_k2",),
        ffn_key="moe_intermediate_size",
        grouped=False,
        kv_heads=128,
        max_positions=4096,
        routed_scaling=2.5,
        expert_keys=("n_routed_experts", "num_local_experts"),
        normalize_router=None,
        normalize_missing=True,
        sigmoid_router=True,
        router_in_dtype=True,
        dense_layers_key="first_k_dense_replace",
        dense_layers_missing=3,
        shared_experts_key="n_shared_experts",
        prediction_layers_key="num_nextn_predict_layers",
        latent=True,
        expert_groups=(8, 4),
        block_fp8=True,
        rules=LATENT_RULES,
    ),
}
