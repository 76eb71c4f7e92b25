"""The families of models, by the prefix of their architectures at HuggingFace: what sets each apart from Llama.

`REFUSED` names architectures that are close to these, and what of them is not supported.
"""

from dataclasses import replace

from hybridflow.architecture.family import (
    LANGUAGE_MODEL,
    POSITIONS,
    WRAPPER,
    AttentionTraits,
    ConfigFieldRule,
    EmbeddingTraits,
    ExpertTraits,
    Family,
    MlpTraits,
    NormTraits,
    PredictionTraits,
    RotationTraits,
    WindowTraits,
)

SPARSE = "sparse attention, which looks at a choice of the keys, is not supported"
NO_CAPS = "scores and logits that tanh caps are not supported"
OF_EACH_LAYER = "embeddings of each layer (PLE) and layers that share keys and values are not supported"
IN_CHUNKS = "attention in chunks, and experts that weigh what goes in, are not supported"

REFUSED = {
    "DeepseekV2" + LANGUAGE_MODEL: "its router is a softmax over groups of experts, which is not supported",
    "DeepseekV32" + LANGUAGE_MODEL: SPARSE,
    "GlmMoeDsa" + LANGUAGE_MODEL: SPARSE,
    "Gemma2" + LANGUAGE_MODEL: NO_CAPS,
    "Gemma3n" + LANGUAGE_MODEL: OF_EACH_LAYER,
    "Gemma3n" + WRAPPER: OF_EACH_LAYER,
    "Gemma4" + LANGUAGE_MODEL: OF_EACH_LAYER,
    "Gemma4" + WRAPPER: OF_EACH_LAYER,
    "GptOss" + LANGUAGE_MODEL: "sinks of attention are not supported",
    "Llama4" + LANGUAGE_MODEL: IN_CHUNKS,
    "Llama4" + WRAPPER: IN_CHUNKS,
    "NemotronH" + LANGUAGE_MODEL: "layers of Mamba are not supported",
}


SILU = ConfigFieldRule("hidden_act", ("silu",), "must be silu")
NO_ATTENTION_BIAS = ConfigFieldRule(
    "attention_bias", (False, None), "biases of attention are not supported in this family"
)

NO_DENSE_LAYERS = (
    ConfigFieldRule("decoder_sparse_step", (1,), "dense layers among layers of experts are not supported"),
    ConfigFieldRule("mlp_only_layers", (None, []), "dense layers among layers of experts are not supported"),
)
GATED_HEADS = AttentionTraits(norms="heads", gate=True)
QWEN35 = Family(
    "qwen3_5",
    mixer="delta_net",
    attention=replace(GATED_HEADS, last="norms"),
    norms=NormTraits(zero_centered=True),
    prediction=PredictionTraits("mtp_num_hidden_layers", at="mtp."),
    model_type="qwen3_5_text",
    score_architecture="Qwen3_5TextForSequenceClassification",
    wrapper="Qwen3_5ForConditionalGeneration",
    wrapper_tied=False,
    missing={
        "head_dim": 256,
        "num_key_value_heads": 4,
        POSITIONS: 32768,
        "partial_rotary_factor": 0.25,
        "mtp_num_hidden_layers": 0,
    },
    rules=(
        SILU,
        NO_ATTENTION_BIAS,
        ConfigFieldRule("attn_output_gate", (True,), "attention without an output gate is not supported"),
        ConfigFieldRule("output_gate_type", ("silu", "swish"), "must be silu"),
        ConfigFieldRule("layer_scale", (False, None), "scales of layers are not supported"),
    ),
)
GEMMA3_RULES = (
    ConfigFieldRule("hidden_activation", ("gelu_pytorch_tanh",), "must be gelu_pytorch_tanh"),
    ConfigFieldRule("attn_logit_softcapping", (None,), NO_CAPS),
    ConfigFieldRule("final_logit_softcapping", (None,), NO_CAPS),
    ConfigFieldRule("use_bidirectional_attention", (False, None), "attention must be causal"),
)
QWEN_EXPERTS = ("num_experts", "num_local_experts")
GLM_EXPERTS = ExpertTraits(
    ("n_routed_experts", "num_local_experts"),
    normalizes=None,
    sigmoid=True,
    dense_layers_key="first_k_dense_replace",
    shared_count_key="n_shared_experts",
)
OF_EXPERTS = MlpTraits("moe_intermediate_size")
WINDOW, SWITCHED_WINDOW = WindowTraits(), WindowTraits(switch=True)
GLM_LITE = Family(
    "glm4_moe_lite",
    mixer="latent",
    attention=AttentionTraits(grouped=False),
    mlp=OF_EXPERTS,
    experts=replace(GLM_EXPERTS, in_groups=True),
    prediction=PredictionTraits("num_nextn_predict_layers"),
    missing={
        "num_key_value_heads": 20,
        POSITIONS: 202752,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    },
    rules=(
        SILU,
        NO_ATTENTION_BIAS,
        ConfigFieldRule("index_topk", (None,), SPARSE),
        ConfigFieldRule("rope_interleave", (True,), "vLLM turns neighbouring dimensions alone"),
        ConfigFieldRule("topk_method", ("noaux_tc",), "the choice of experts must be by sigmoids with a bias"),
        ConfigFieldRule("scoring_func", ("sigmoid",), "the choice of experts must be by sigmoids with a bias"),
        ConfigFieldRule("moe_layer_freq", (1, None), "dense layers among layers of experts are not supported"),
    ),
)

FAMILIES = {
    "Llama": Family(
        "llama",
        rules=(
            SILU,
            ConfigFieldRule("attention_bias", (False, None), "biases of Llama are not supported"),
            ConfigFieldRule("mlp_bias", (False, None), "biases of Llama are not supported"),
        ),
    ),
    "Mistral": Family(
        "mistral",
        windows=WINDOW,
        wrapper="Mistral3ForConditionalGeneration",
        missing={"num_key_value_heads": 8, POSITIONS: 131072, "sliding_window": 4096},
        rules=(SILU,),
    ),
    "Qwen2": Family(
        "qwen2",
        attention=AttentionTraits(bias=True, last="bias"),
        windows=SWITCHED_WINDOW,
        missing={"num_key_value_heads": 32, POSITIONS: 32768, "sliding_window": 4096},
        rules=(SILU,),
    ),
    "Qwen3": Family(
        "qwen3",
        attention=AttentionTraits(norms="heads", last="norms"),
        windows=SWITCHED_WINDOW,
        missing={"head_dim": 128, "num_key_value_heads": 32, POSITIONS: 32768, "sliding_window": 4096},
        rules=(SILU, NO_ATTENTION_BIAS),
    ),
    "Qwen3_5": QWEN35,
    "Qwen3_5Moe": replace(
        QWEN35,
        name="qwen3_5_moe",
        attention=GATED_HEADS,
        mlp=OF_EXPERTS,
        experts=ExpertTraits(QWEN_EXPERTS, shared_size_key="shared_expert_intermediate_size"),
        model_type="qwen3_5_moe_text",
        score_architecture="",
        wrapper="Qwen3_5MoeForConditionalGeneration",
        missing={**QWEN35.missing, "num_key_value_heads": 2},
        rules=(*QWEN35.rules, *NO_DENSE_LAYERS),
    ),
    "Phi3": Family(
        "phi3",
        attention=AttentionTraits(fused=True),
        rotation=RotationTraits(kinds=("default",)),
        windows=WindowTraits("all"),
        mlp=MlpTraits(fused="gated"),
        missing={POSITIONS: 4096, "pad_token_id": 32000},
        rules=(SILU,),
    ),
    "Ministral3": Family(
        "ministral3",
        attention=AttentionTraits(grows=True),
        rotation=RotationTraits(kinds=("yarn",)),
        windows=WindowTraits("all"),
        wrapper="Mistral3ForConditionalGeneration",
        missing={"head_dim": 128, "num_key_value_heads": 8, POSITIONS: 262144, "pad_token_id": 11},
        rules=(SILU,),
    ),
    "SmolLM3": Family(
        "smollm3",
        mixer="unturned",
        missing={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            POSITIONS: 32768,
            "pad_token_id": 128004,
            "rope_theta": 2e6,
        },
        rules=(
            SILU,
            NO_ATTENTION_BIAS,
            ConfigFieldRule("mlp_bias", (False, None), "biases of the MLP are not supported"),
            ConfigFieldRule("use_sliding_window", (False, None), "windows are not supported in this family"),
        ),
    ),
    "Olmo3": Family(
        "olmo3",
        attention=AttentionTraits(norms="all"),
        rotation=RotationTraits(by_layer=True, window_theta=5e5),
        windows=WindowTraits("layer_types"),
        norms=NormTraits("behind"),
        missing={
            "pad_token_id": 1,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        rules=(SILU, NO_ATTENTION_BIAS),
    ),
    "Gemma3": Family(
        "gemma3",
        attention=AttentionTraits(norms="heads", scale_key="query_pre_attn_scalar"),
        rotation=RotationTraits(by_layer=True, window_theta_key="rope_local_base_freq"),
        windows=WindowTraits("layer_types"),
        mlp=MlpTraits(activation="geglu"),
        norms=NormTraits("around", zero_centered=True),
        embedding=EmbeddingTraits(scaled=True),
        model_type="gemma3_text",
        score_architecture="Gemma3TextForSequenceClassification",
        wrapper="Gemma3ForConditionalGeneration",
        missing={
            "tie_word_embeddings": True,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "rms_norm_eps": 1e-6,
            POSITIONS: 131072,
            "pad_token_id": 0,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        rules=(NO_ATTENTION_BIAS, *GEMMA3_RULES),
    ),
    "Glm": Family(
        "glm",
        attention=AttentionTraits(bias=True),
        rotation=RotationTraits(interleaved=True),
        mlp=MlpTraits(fused="rows"),
        missing={
            "head_dim": 128,
            "num_key_value_heads": 2,
            POSITIONS: 131072,
            "pad_token_id": 151329,
            "partial_rotary_factor": 0.5,
        },
        rules=(SILU, ConfigFieldRule("attention_bias", (True,), "GLM-4 has biases of queries, keys and values")),
    ),
    "OPT": Family(
        "opt",
        attention=AttentionTraits(bias=True, grouped=False),
        mlp=MlpTraits("ffn_dim", activation="relu"),
        norms=NormTraits(eps=1e-5, before_key="do_layer_norm_before"),
        embedding=EmbeddingTraits(
            "model.decoder.embed_tokens.weight", size_key="word_embed_proj_dim", position_offset=2
        ),
        linear_bias=True,
        missing={"tie_word_embeddings": True, "pad_token_id": 1},
        rules=(
            ConfigFieldRule("_remove_final_layer_norm", (False,), "the norm after the last layer is needed"),
            ConfigFieldRule("activation_function", ("relu",), "must be relu"),
            ConfigFieldRule("enable_bias", (True,), "linear layers without biases are not supported"),
            ConfigFieldRule("layer_norm_elementwise_affine", (True,), "norms without weights are not supported"),
        ),
    ),
    "Mixtral": Family(
        "mixtral",
        windows=WINDOW,
        experts=ExpertTraits(("num_local_experts",), names="mixtral"),
        missing={"num_key_value_heads": 8, POSITIONS: 131072, "rope_theta": 1e6},
        rules=(SILU,),
    ),
    "Qwen3Moe": Family(
        "qwen3_moe",
        attention=AttentionTraits(norms="heads"),
        windows=SWITCHED_WINDOW,
        mlp=OF_EXPERTS,
        experts=ExpertTraits(QWEN_EXPERTS, normalizes=None),
        missing={"num_key_value_heads": 4, POSITIONS: 32768, "sliding_window": 4096},
        rules=(SILU, NO_ATTENTION_BIAS, *NO_DENSE_LAYERS),
    ),
    "Glm4Moe": Family(
        "glm4_moe",
        attention=AttentionTraits(bias=True, norms_key="use_qk_norm", last="norms"),
        mlp=OF_EXPERTS,
        experts=GLM_EXPERTS,
        prediction=PredictionTraits("num_nextn_predict_layers"),
        missing={
            "num_key_value_heads": 8,
            POSITIONS: 131072,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
        },
        rules=(
            SILU,
            ConfigFieldRule("attention_bias", (True,), "GLM-4.5 has biases of queries, keys and values", required=True),
            ConfigFieldRule("n_group", (1, None), "experts in groups are not supported"),
            ConfigFieldRule("topk_group", (1, None), "experts in groups are not supported"),
        ),
    ),
    "Glm4MoeLite": GLM_LITE,
    "DeepseekV3": replace(
        GLM_LITE,
        name="deepseek_v3",
        experts=replace(GLM_EXPERTS, in_groups=True, router_in_dtype=True),
        block_fp8=True,
        other_model_types=("kimi_k2",),
        missing={
            "num_key_value_heads": 128,
            POSITIONS: 4096,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
}
BY_NAME = {family.name: family for family in FAMILIES.values()}
