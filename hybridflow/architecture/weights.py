"""The one table of weights: HuggingFace name <-> megatron name <-> engine name, split over ranks, and shape.

Conversion, loading, resharding and export read this table and nothing else. A parameter (`weight`) is made of one or
more parts, the tensors of a HuggingFace checkpoint: `parts` says where their rows lie in it, `shards` which rows and
columns of it a rank holds. A new family is an entry in `TABLES` here and one in `families`.

vLLM holds what megatron's ranks hold, except QKV: [all q; all k; all v] of the rank, keys and values copied where ranks
outnumber them; and where a weight has an `engine_split`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from hybridflow.architecture.adapter_weights import adapter_weights
from hybridflow.architecture.latent_weights import latent_attention
from hybridflow.architecture.layer_kinds import DENSE, EXPERTS, UNTURNED, WINDOW, DeltaSizes, LayerKind, Mlp
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.architecture.tied_head import EMBEDDING, HEAD, OUTPUT
from hybridflow.architecture.weight import Shape, Shapes, Table, Weight

# ------------------------------------------------------------------------------------------------------- shapes


def _hidden(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size,),)


def _head_dim(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.head_dim,),)


def _vocab(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.vocab_size, spec.embedding_size),)


def _project_in(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.embedding_size),)


def _project_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.embedding_size, spec.hidden_size),)


def _positions(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_positions, spec.hidden_size),)


def _qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    kv = (spec.num_kv_heads * spec.head_dim, spec.hidden_size)
    return ((spec.num_query_blocks * spec.head_dim, spec.hidden_size), kv, kv)


def _fused_qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    """One part: queries, keys, values."""
    return ((sum(rows for rows, _ in _qkv(spec)), spec.hidden_size),)


def _query_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_heads * spec.head_dim,),)


def _key_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_kv_heads * spec.head_dim,),)


def _qkv_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return tuple(shape[:1] for shape in _qkv(spec))


def _attention_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.num_heads * spec.head_dim),)


def _gate_and_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size, spec.hidden_size),) * 2


def _gate_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((2 * spec.ffn_hidden_size, spec.hidden_size),)


def _up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size, spec.hidden_size),)


def _up_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size,),)


def _down(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.ffn_hidden_size),)


def _router(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_experts, spec.hidden_size),)


def _router_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_experts,),)


def _gate_and_up_of(mlp: Mlp) -> Shapes:
    """Of what every token of a layer goes through."""
    return lambda spec: ((spec.mlp_size(mlp), spec.hidden_size),) * 2


def _down_of(mlp: Mlp) -> Shapes:
    return lambda spec: ((spec.hidden_size, spec.mlp_size(mlp)),)


def _gate_of_shared_expert(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.hidden_size),)


def _delta(spec: ModelSpec) -> DeltaSizes:
    assert spec.delta is not None, f"{spec.family} has no gated delta nets"
    return spec.delta


def _delta_qkv_and_z(spec: ModelSpec) -> tuple[Shape, ...]:
    sizes = _delta(spec)
    return ((sum(sizes.runs), spec.hidden_size), (sizes.values, spec.hidden_size))


def _delta_qkvz_runs(spec: ModelSpec) -> tuple[int, ...]:
    return (*_delta(spec).runs, _delta(spec).values)


def _delta_b_and_a(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_delta(spec).value_heads, spec.hidden_size),) * 2


def _delta_ba_runs(spec: ModelSpec) -> tuple[int, ...]:
    return (_delta(spec).value_heads,) * 2


def _delta_convolution(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((sum(_delta(spec).runs), 1, _delta(spec).kernel),)


def _delta_convolution_runs(spec: ModelSpec) -> tuple[int, ...]:
    return _delta(spec).runs


def _delta_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_delta(spec).value_heads,),)


def _delta_value_dim(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_delta(spec).value_dim,),)


def _delta_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, _delta(spec).values),)


def _score(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.embedding_size),)


# ------------------------------------------------------------------------------------------------------- the table

LAYERS, OPT_LAYERS = "model.layers.{layer}.", "model.decoder.layers.{layer}."
NORM_IN_QKV, NORM_IN_FC1 = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
CONVOLUTION = "self_attention.conv1d.weight"
DELTA_DENSE = LayerKind("delta_net")
STORED_EXPERTS = "mlp.experts.experts."
REPLICATED, ROWS, COLUMNS = Split.REPLICATED, Split.ROWS, Split.COLUMNS


def _top(megatron: str, name: str, split: Split, shapes: Shapes) -> Weight:
    return Weight(megatron, (name,), name, split, shapes)


def _layer(
    megatron: str, hf: str, split: Split, shapes: Shapes, *, engine: str = "", stored: str = "", at: str = LAYERS
) -> Weight:
    """hf: the names of the parts, separated by spaces; the engine's is the same where it is not given."""
    parts = tuple(at + name for name in hf.split())
    name = at + (engine or hf)
    return Weight("decoder.layers.{layer}." + megatron, parts, name, split, shapes, stored=stored)


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
        _layer("mlp.router.weight", hf + ".gate.weight", REPLICATED, _router),
        _layer(
            "mlp.experts." + fc1,
            gate_up,
            Split.GATED,
            _gate_and_up,
            engine=engine + "w13_weight",
            stored=STORED_EXPERTS + fc1,
        ),
        _layer(
            "mlp.experts." + fc2,
            f"{expert}{down}.weight",
            COLUMNS,
            _down,
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


LM_HEAD = _top(OUTPUT, HEAD, Split.VOCAB, _vocab)
VALUE_HEAD = _top(OUTPUT, "score.weight", REPLICATED, _score)
INPUT_NORM = _layer(
    "input_layernorm.weight", "input_layernorm.weight", REPLICATED, _hidden, stored=NORM_IN_QKV + "weight"
)
MLP_NORM = _layer(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    REPLICATED,
    _hidden,
    stored=NORM_IN_FC1 + "weight",
)
ROUTER_NORM = replace(MLP_NORM, stored="")  # not fused: the router reads the norm's output too
ATTENTION = (
    INPUT_NORM,
    _qkv_parts("weight", _qkv),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", COLUMNS, _attention_out),
)
QKV_BIAS = _qkv_parts("bias", _qkv_bias)
QK_NORM = tuple(
    _layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", REPLICATED, _head_dim) for x in "qk"
)
GATE_AND_UP = _layer(
    "mlp.linear_fc1.weight",
    "mlp.gate_proj.weight mlp.up_proj.weight",
    Split.GATED,
    _gate_and_up,
    engine="mlp.gate_up_proj.weight",
)
DENSE_MLP = (  # of the first layers of a model with experts
    replace(GATE_AND_UP, part_shapes=_gate_and_up_of("dense")),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", COLUMNS, _down_of("dense")),
)
SHARED_EXPERT = (
    _layer(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        Split.GATED,
        _gate_and_up_of("experts"),
        engine="mlp.shared_experts.gate_up_proj.weight",
    ),
    _layer(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        COLUMNS,
        _down_of("experts"),
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
    _layer("mlp.shared_experts.gate.weight", "mlp.shared_expert_gate.weight", REPLICATED, _gate_of_shared_expert),
)
ROUTER_BIAS = replace(
    _layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", REPLICATED, _router_bias), float32=True
)
GATE_UP = replace(  # vLLM 0.32.0 runs the class of transformers for GLM-4, and splits this parameter
    _layer("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", Split.GATED, _gate_up), engine_split=ROWS
)
DOWN = _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", COLUMNS, _down)
VECTOR = (REPLICATED, _hidden)

ENDS = {
    "embeddings": (_top(EMBEDDING, "model.embed_tokens.weight", Split.VOCAB, _vocab),),
    "final": (_top("decoder.final_layernorm.weight", "model.norm.weight", *VECTOR),),
}
NET = "linear_attn."  # of HuggingFace and the engine
DELTA_NET = (
    replace(INPUT_NORM, stored=""),  # not fused: two linear layers read what the norm gives
    replace(
        _layer(
            "self_attention.in_proj_qkvz.weight",
            f"{NET}in_proj_qkv.weight {NET}in_proj_z.weight",
            Split.PARTS,
            _delta_qkv_and_z,
            engine=NET + "in_proj_qkvz.weight",
        ),
        runs=_delta_qkvz_runs,
    ),
    replace(
        _layer(
            "self_attention.in_proj_ba.weight",
            f"{NET}in_proj_b.weight {NET}in_proj_a.weight",
            Split.PARTS,
            _delta_b_and_a,
            engine=NET + "in_proj_ba.weight",
        ),
        runs=_delta_ba_runs,
    ),
    replace(
        _layer(CONVOLUTION, NET + "conv1d.weight", Split.PARTS, _delta_convolution),
        runs=_delta_convolution_runs,
    ),
    replace(_layer("self_attention.A_log", NET + "A_log", ROWS, _delta_heads), float32=True),
    _layer("self_attention.dt_bias", NET + "dt_bias", ROWS, _delta_heads),
    _layer("self_attention.out_norm.weight", NET + "norm.weight", REPLICATED, _delta_value_dim),
    _layer("self_attention.out_proj.weight", NET + "out_proj.weight", COLUMNS, _delta_out),
)
OPT_ENDS = {
    "embeddings": (
        _top(EMBEDDING, "model.decoder.embed_tokens.weight", Split.VOCAB, _vocab),
        _top("embedding.position_embeddings.weight", "model.decoder.embed_positions.weight", REPLICATED, _positions),
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
    _layer("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", Split.QKV, _fused_qkv),
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
    for x, shapes in (("q", _query_heads), ("k", _key_heads))
)
OLMO_LAYER = (*ATTENTION[1:], *WIDE_QK_NORM, GATE_AND_UP, DOWN, *NORMS_BEHIND)
GEMMA_LAYER = (*ATTENTION, *QK_NORM, BETWEEN_NORM, GATE_AND_UP, DOWN, *NORMS_BEHIND)
OPT_ATTENTION = (
    _qkv_parts("weight", _qkv, OPT_LAYERS),
    _qkv_parts("bias", _qkv_bias, OPT_LAYERS),
    *_opt("self_attention.linear_proj", "self_attn.out_proj", (COLUMNS, _attention_out), VECTOR),
)
OPT_MLP = (
    *_opt("mlp.linear_fc1", "fc1", (ROWS, _up), (ROWS, _up_bias)),
    *_opt("mlp.linear_fc2", "fc2", (COLUMNS, _down), VECTOR),
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
    "embedding.word_embeddings.project_in.weight", "model.decoder.project_in.weight", REPLICATED, _project_in
)
PROJECT_OUT = _top("project_out.weight", "model.decoder.project_out.weight", REPLICATED, _project_out)
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
FUSED_NAMES = {NORM_IN_QKV: "input_layernorm.", NORM_IN_FC1: "pre_mlp_layernorm."}


# ------------------------------------------------------------------------------------------------------- models


def table_of(spec: ModelSpec) -> Table:
    """The family's table, with what sets single models apart: norms after the residual sums, projected embeddings."""
    table = TABLES[spec.family]
    if spec.post_norm:
        assert spec.family == "opt", f"{spec.family} has no layers with norms after the residual sums"
        table = replace(table, layers={DENSE: OPT_POST_NORM_LAYER}, final=())
    if spec.latent is not None:
        attention = latent_attention(spec.latent)
        table = replace(table, layers={kind: (*attention, *layer) for kind, layer in table.layers.items()})
    if spec.qk_norm and not spec.traits.qk_norm:  # where some models of a family have them
        table = replace(table, layers={kind: (*layer, *QK_NORM) for kind, layer in table.layers.items()})
    if spec.shared_ffn_hidden_size:
        expert = GATED_SHARED_EXPERT if spec.traits.shared_size_key else SHARED_EXPERT
        shared = {kind: expert if kind.mlp == "experts" else () for kind in table.layers}
        table = replace(table, layers={kind: (*layer, *shared[kind]) for kind, layer in table.layers.items()})
    if spec.projected_size:
        tokens, *others = table.embeddings
        table = replace(table, embeddings=(tokens, PROJECT_IN, *others), final=(*table.final, PROJECT_OUT))
    return table


def embedding(spec: ModelSpec) -> Weight:
    """Of the tokens."""
    return table_of(spec).embeddings[0]


def layer_weights(spec: ModelSpec, kind: LayerKind) -> tuple[Weight, ...]:
    """Of each layer of a kind."""
    stacked = len({table_of(spec).layers[each] for each in spec.layer_kinds}) == 1
    weights = (replace(weight, stacked=stacked).for_experts(spec.num_experts) for weight in table_of(spec).layers[kind])
    return tuple(each for weight in weights for each in (weight, *adapter_weights(weight, spec.lora)))


def is_trained(weight: Weight, spec: ModelSpec) -> bool:
    """Whether a model that is trained trains this weight: with adapters these and a value head alone."""
    return spec.lora is None or bool(weight.adapter) or weight == VALUE_HEAD


def head_weights(spec: ModelSpec, head: Head) -> tuple[Weight, ...]:
    """What comes last: nothing where the output layer is the embedding."""
    if head == "score":
        return (VALUE_HEAD,)
    return () if spec.tied else (LM_HEAD,)


def model_weights(spec: ModelSpec, head: Head) -> Iterator[Weight]:
    """Every parameter of a model with this head, in the order of the layers."""
    return (weight for weight, _ in staged_weights(spec, head, [range(spec.num_layers)]))


def staged_weights(spec: ModelSpec, head: Head, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Weight, int]]:
    """`model_weights` with the first pipeline stage that holds each; stages: the layers of every stage."""
    table = table_of(spec)
    in_layers = {kind: _weights_of_layers(layer_weights(spec, kind), spec.num_layers) for kind in spec.layer_kinds}
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    yield from ((weight, 0) for weight in table.embeddings)
    for layer in range(spec.num_layers):
        yield from ((weight, stage_of[layer]) for weight in in_layers[spec.layer_kind(layer)][layer])
    yield from ((weight, len(stages) - 1) for weight in (*table.final, *head_weights(spec, head)))


@lru_cache(maxsize=16)  # a search asks for many stages of few models
def _weights_of_layers(in_layer: tuple[Weight, ...], num_layers: int) -> tuple[tuple[Weight, ...], ...]:
    return tuple(tuple(weight.for_layer(layer) for weight in in_layer) for layer in range(num_layers))


def frozen_weights(spec: ModelSpec, head: Head) -> frozenset[str]:
    """megatron's names of the weights that a model with adapters does not train; none of one without."""
    if spec.lora is None:
        return frozenset()
    return frozenset(weight.megatron for weight in model_weights(spec, head) if not is_trained(weight, spec))


def num_parameters(spec: ModelSpec, head: Head) -> int:
    """With the true vocabulary."""
    table = table_of(spec)
    kinds = Counter(map(spec.layer_kind, range(spec.num_layers)))
    in_layers = sum(count * _num_elements(layer_weights(spec, kind), spec) for kind, count in kinds.items())
    return in_layers + _num_elements((*table.embeddings, *table.final, *head_weights(spec, head)), spec)


def num_trained(spec: ModelSpec, head: Head) -> int:
    """Of a model with adapters: their elements, and a value head's."""
    return _num_elements((weight for weight in model_weights(spec, head) if is_trained(weight, spec)), spec)


def _num_elements(weights: Iterable[Weight], spec: ModelSpec) -> int:
    return sum(prod(shape) for weight in weights for shape in weight.shapes(spec))


def canonical_name(name: str) -> str:
    """The table's name of a megatron parameter: wrappers and Transformer Engine's fusions undone."""
    name = name.replace("module.", "")
    for fused, plain in FUSED_NAMES.items():
        name = name.replace(fused, plain)
    return name


def stored_at(weight: Weight) -> tuple[str, int | None]:
    """(key in a torch_dist checkpoint, index along its leading axis of layers); no index where it has no such axis.

    The keys are those that megatron-core 0.16.1 writes for layers that are all alike. Other layers have a key each.
    """
    if weight.layer is None:
        return weight.megatron, None
    prefix = f"decoder.layers.{weight.layer}."
    name = weight.stored or weight.megatron.removeprefix(prefix)
    return ("decoder.layers." + name, weight.layer) if weight.stacked else (prefix + name, None)
