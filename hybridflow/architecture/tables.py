"""The table of each family's weights: what kinds of layers are made of, in the three namings.

What a name and a split mean: `weights`. A new family is an entry in `TABLES` here and one in `families`.
"""

from dataclasses import replace

from hybridflow.architecture import weight_shapes as shape
from hybridflow.architecture.layer_kinds import DENSE, EXPERTS, UNTURNED, WINDOW, LayerKind
from hybridflow.architecture.shards import Split
from hybridflow.architecture.tied_head import EMBEDDING, HEAD, OUTPUT
from hybridflow.architecture.weight import Runs, Shapes, Table, Weight

LAYERS, OPT_LAYERS = "model.layers.{layer}.", "model.decoder.layers.{layer}."
NORM_IN_QKV, NORM_IN_FC1 = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
CONVOLUTION = "self_attention.conv1d.weight"
DELTA_DENSE = LayerKind("delta_net")
STORED_EXPERTS = "mlp.experts.experts."
REPLICATED, ROWS, COLUMNS = Split.REPLICATED, Split.ROWS, Split.COLUMNS


def _top(megatron: str, name: str, split: Split, shapes: Shapes) -> Weight:
    return Weight(megatron, (name,), name, split, shapes)


def _layer(
    megatron: str,
    hf: str,
    split: Split,
    shapes: Shapes,
    *,
    engine: str = "",
    stored: str = "",
    at: str = LAYERS,
    runs: Runs | None = None,
) -> Weight:
    """hf: the names of the parts, separated by spaces; the engine's is the same where it is not given."""
    parts = tuple(at + name for name in hf.split())
    name = at + (engine or hf)
    return Weight("decoder.layers.{layer}." + megatron, parts, name, split, shapes, stored=stored, runs=runs)


def _qkv_parts(kind: str, shapes: Shapes, at: str = LAYERS) -> Weight:
    """kind: weight or bias."""
    parts = " ".join(f"self_attn.{x}_proj.{kind}" for x in "qkv")
    engine = f"self_attn.qkv_proj.{kind}"
    return _layer(f"self_attention.linear_qkv.{kind}", parts, Split.QKV, shapes, engine=engine, at=at)


def _experts(hf: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """hf: where HuggingFace and the engine have the mixture; gate, up, down: what an expert's matrices are called."""
    expert, engine = hf + ".experts.{expert}.", hf + ".experts.routed_experts."
    gate_up = f"{expert}{gate}.weight {expert}{up}.weight"
    fc1, fc2 = "linear_fc1.weight", "linear_fc2.weight"
    return (
        _layer("mlp.router.weight", hf + ".gate.weight", REPLICATED, shape.router),
        _layer(
            "mlp.experts." + fc1,
            gate_up,
            Split.GATED,
            shape.gate_and_up,
            engine=engine + "w13_weight",
            stored=STORED_EXPERTS + fc1,
        ),
        _layer(
            "mlp.experts." + fc2,
            f"{expert}{down}.weight",
            COLUMNS,
            shape.down,
            engine=engine + "w2_weight",
            stored=STORED_EXPERTS + fc2,
        ),
    )


def _opt(
    megatron: str, name: str, weight: tuple[Split, Shapes], bias: tuple[Split, Shapes], stored: str = ""
) -> tuple[Weight, ...]:
    """Weight and bias of a layer of OPT, whose engine calls them as HuggingFace does."""
    return tuple(
        _layer(f"{megatron}.{kind}", f"{name}.{kind}", *cut, stored=stored and stored + kind, at=OPT_LAYERS)
        for kind, cut in (("weight", weight), ("bias", bias))
    )


def _experts_of_glm() -> tuple[Weight, ...]:
    """Experts with a router in float32."""
    router, *experts = _experts("mlp", "gate_proj", "up_proj", "down_proj")
    return (replace(router, float32=True), *experts)


LM_HEAD = _top(OUTPUT, HEAD, Split.VOCAB, shape.vocab)
VALUE_HEAD = _top(OUTPUT, "score.weight", REPLICATED, shape.score)
INPUT_NORM = _layer(
    "input_layernorm.weight", "input_layernorm.weight", REPLICATED, shape.hidden, stored=NORM_IN_QKV + "weight"
)
MLP_NORM = _layer(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    REPLICATED,
    shape.hidden,
    stored=NORM_IN_FC1 + "weight",
)
ROUTER_NORM = replace(MLP_NORM, stored="")  # not fused: the router reads the norm's output too
ATTENTION = (
    INPUT_NORM,
    _qkv_parts("weight", shape.qkv),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", COLUMNS, shape.attention_out),
)
QKV_BIAS = _qkv_parts("bias", shape.qkv_bias)
QK_NORM = tuple(
    _layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", REPLICATED, shape.head_dim)
    for x in "qk"
)
GATE_AND_UP = _layer(
    "mlp.linear_fc1.weight",
    "mlp.gate_proj.weight mlp.up_proj.weight",
    Split.GATED,
    shape.gate_and_up,
    engine="mlp.gate_up_proj.weight",
)
DENSE_MLP = (  # of the first layers of a model with experts
    replace(GATE_AND_UP, part_shapes=shape.gate_and_up_of("dense")),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", COLUMNS, shape.down_of("dense")),
)
SHARED_EXPERT = (
    _layer(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        Split.GATED,
        shape.gate_and_up_of("experts"),
        engine="mlp.shared_experts.gate_up_proj.weight",
    ),
    _layer(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        COLUMNS,
        shape.down_of("experts"),
    ),
)
GATED_SHARED_EXPERT = (
    *(
        replace(
            weight,
            hf=tuple(name.replace("shared_experts", "shared_expert") for name in weight.hf),
            engine=weight.engine.replace("shared_experts", "shared_expert"),
        )
        for weight in SHARED_EXPERT
    ),
    _layer("mlp.shared_experts.gate.weight", "mlp.shared_expert_gate.weight", REPLICATED, shape.gate_of_shared_expert),
)
ROUTER_BIAS = replace(
    _layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", REPLICATED, shape.router_bias), float32=True
)
GATE_UP = replace(  # vLLM 0.32.0 runs the class of transformers for GLM-4, and splits this parameter
    _layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", Split.GATED, shape.gate_up), engine_split=ROWS
)
DOWN = _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", COLUMNS, shape.down)
VECTOR = (REPLICATED, shape.hidden)

ENDS = {
    "embeddings": (_top(EMBEDDING, "model.embed_tokens.weight", Split.VOCAB, shape.vocab),),
    "final": (_top("decoder.final_layernorm.weight", "model.norm.weight", *VECTOR),),
}
NET = "linear_attn."  # of HuggingFace and the engine
DELTA_NET = (
    replace(INPUT_NORM, stored=""),  # not fused: two linear layers read what the norm gives
    _layer(
        "self_attention.in_proj_qkvz.weight",
        f"{NET}in_proj_qkv.weight {NET}in_proj_z.weight",
        Split.PARTS,
        shape.delta_qkv_and_z,
        engine=NET + "in_proj_qkvz.weight",
        runs=shape.delta_qkvz_runs,
    ),
    _layer(
        "self_attention.in_proj_ba.weight",
        f"{NET}in_proj_b.weight {NET}in_proj_a.weight",
        Split.PARTS,
        shape.delta_b_and_a,
        engine=NET + "in_proj_ba.weight",
        runs=shape.delta_ba_runs,
    ),
    _layer(CONVOLUTION, NET + "conv1d.weight", Split.PARTS, shape.delta_convolution, runs=shape.delta_convolution_runs),
    replace(_layer("self_attention.A_log", NET + "A_log", ROWS, shape.delta_heads), float32=True),
    _layer("self_attention.dt_bias", NET + "dt_bias", ROWS, shape.delta_heads),
    _layer("self_attention.out_norm.weight", NET + "norm.weight", REPLICATED, shape.delta_value_dim),
    _layer("self_attention.out_proj.weight", NET + "out_proj.weight", COLUMNS, shape.delta_out),
)
OPT_ENDS = {
    "embeddings": (
        _top(EMBEDDING, "model.decoder.embed_tokens.weight", Split.VOCAB, shape.vocab),
        _top(
            "embedding.position_embeddings.weight", "model.decoder.embed_positions.weight", REPLICATED, shape.positions
        ),
    ),
    "final": tuple(
        _top(f"decoder.final_layernorm.{kind}", f"model.decoder.final_layer_norm.{kind}", *VECTOR)
        for kind in ("weight", "bias")
    ),
}
UNFUSED_NORM = replace(INPUT_NORM, stored="")  # two linear layers read what the norm gives
LATENT_DENSE, LATENT_EXPERTS = LayerKind("latent"), LayerKind("latent", "experts")  # `table_of` adds the attention
LLAMA_LAYER = (*ATTENTION, MLP_NORM, GATE_AND_UP, DOWN)
NORMS_BEHIND = (  # models.norms_behind has them
    _layer("post_attention_layernorm.weight", "post_attention_layernorm.weight", *VECTOR),
    _layer("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", *VECTOR),
)
BETWEEN_NORM = replace(MLP_NORM, hf=(LAYERS + "pre_feedforward_layernorm.weight",))
BETWEEN_NORM = replace(BETWEEN_NORM, engine=BETWEEN_NORM.hf[0])
PHI_LAYER = (
    INPUT_NORM,
    _layer("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", Split.QKV, shape.fused_qkv),
    *ATTENTION[2:],
    MLP_NORM,
    replace(GATE_UP, engine_split=None),
    DOWN,
)
WIDE_QK_NORM = tuple(  # over all heads
    replace(  # each of the engine's ranks has all of it
        _layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", ROWS, shapes),
        engine_split=REPLICATED,
    )
    for x, shapes in (("q", shape.query_heads), ("k", shape.key_heads))
)
OLMO_LAYER = (*ATTENTION[1:], *WIDE_QK_NORM, GATE_AND_UP, DOWN, *NORMS_BEHIND)
GEMMA_LAYER = (*ATTENTION, *QK_NORM, BETWEEN_NORM, GATE_AND_UP, DOWN, *NORMS_BEHIND)
OPT_ATTENTION = (
    _qkv_parts("weight", shape.qkv, OPT_LAYERS),
    _qkv_parts("bias", shape.qkv_bias, OPT_LAYERS),
    *_opt("self_attention.linear_proj", "self_attn.out_proj", (COLUMNS, shape.attention_out), VECTOR),
)
OPT_MLP = (
    *_opt("mlp.linear_fc1", "fc1", (ROWS, shape.up), (ROWS, shape.up_bias)),
    *_opt("mlp.linear_fc2", "fc2", (COLUMNS, shape.down), VECTOR),
)
OPT_LAYER = (
    *_opt("input_layernorm", "self_attn_layer_norm", VECTOR, VECTOR, stored=NORM_IN_QKV),
    *OPT_ATTENTION,
    *_opt("pre_mlp_layernorm", "final_layer_norm", VECTOR, VECTOR, stored=NORM_IN_FC1),
    *OPT_MLP,
)
OPT_POST_NORM_LAYER = (  # models.opt has these norms
    *OPT_ATTENTION,
    *_opt("post_attention_layernorm", "self_attn_layer_norm", VECTOR, VECTOR),
    *OPT_MLP,
    *_opt("post_mlp_layernorm", "final_layer_norm", VECTOR, VECTOR),
)
PROJECT_IN = _top(
    "embedding.word_embeddings.project_in.weight", "model.decoder.project_in.weight", REPLICATED, shape.project_in
)
PROJECT_OUT = _top("project_out.weight", "model.decoder.project_out.weight", REPLICATED, shape.project_out)
TABLES = {
    "llama": Table(layers={DENSE: LLAMA_LAYER}, **ENDS),
    "mistral": Table(layers={DENSE: LLAMA_LAYER}, **ENDS),
    "qwen2": Table(layers={DENSE: (*LLAMA_LAYER, QKV_BIAS)}, **ENDS),
    "qwen3": Table(layers={DENSE: (*LLAMA_LAYER, *QK_NORM)}, **ENDS),
    "phi3": Table(layers=dict.fromkeys((WINDOW, DENSE), PHI_LAYER), **ENDS),
    "ministral3": Table(layers=dict.fromkeys((WINDOW, DENSE), LLAMA_LAYER), **ENDS),
    "smollm3": Table(layers=dict.fromkeys((UNTURNED, DENSE), LLAMA_LAYER), **ENDS),
    "olmo3": Table(layers=dict.fromkeys((WINDOW, DENSE), OLMO_LAYER), **ENDS),
    "gemma3": Table(layers=dict.fromkeys((WINDOW, DENSE), GEMMA_LAYER), **ENDS),
    "glm": Table(layers={DENSE: (*ATTENTION, QKV_BIAS, MLP_NORM, GATE_UP, DOWN)}, **ENDS),
    "opt": Table(layers={DENSE: OPT_LAYER}, **OPT_ENDS),
    "mixtral": Table(
        layers={EXPERTS: (*ATTENTION, ROUTER_NORM, *_experts("block_sparse_moe", "w1", "w3", "w2"))}, **ENDS
    ),
    "qwen3_moe": Table(
        layers={EXPERTS: (*ATTENTION, *QK_NORM, ROUTER_NORM, *_experts("mlp", "gate_proj", "up_proj", "down_proj"))},
        **ENDS,
    ),
    "qwen3_5": Table(
        layers={DENSE: (*LLAMA_LAYER, *QK_NORM), DELTA_DENSE: (*DELTA_NET, MLP_NORM, GATE_AND_UP, DOWN)}, **ENDS
    ),
    "qwen3_5_moe": Table(
        layers={
            EXPERTS: (*ATTENTION, *QK_NORM, ROUTER_NORM, *_experts("mlp", "gate_proj", "up_proj", "down_proj")),
            LayerKind("delta_net", "experts"): (
                *DELTA_NET,
                ROUTER_NORM,
                *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
            ),
        },
        **ENDS,
    ),
    "glm4_moe": Table(
        layers={
            EXPERTS: (*ATTENTION, QKV_BIAS, ROUTER_NORM, *_experts_of_glm(), ROUTER_BIAS),
            DENSE: (*ATTENTION, QKV_BIAS, MLP_NORM, *DENSE_MLP),
        },
        **ENDS,
    ),
    "glm4_moe_lite": Table(
        layers={
            LATENT_EXPERTS: (UNFUSED_NORM, ROUTER_NORM, *_experts_of_glm(), ROUTER_BIAS),
            LATENT_DENSE: (UNFUSED_NORM, MLP_NORM, *DENSE_MLP),
        },
        **ENDS,
    ),
    "deepseek_v3": Table(
        layers={
            LATENT_EXPERTS: (
                UNFUSED_NORM,
                ROUTER_NORM,
                *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
                ROUTER_BIAS,
            ),
            LATENT_DENSE: (UNFUSED_NORM, MLP_NORM, *DENSE_MLP),
        },
        **ENDS,
    ),
}

# Transformer Engine fuses the norms into the linear layers that follow them.
