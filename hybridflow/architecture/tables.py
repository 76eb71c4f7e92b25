"""The one table of weights of a model: what its family is composed of, in the three namings.

What a name and a split mean: `weights`. Mixers and MLPs say their own; norms, embeddings and heads are here.
"""

from dataclasses import replace
from functools import lru_cache

from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.mixers.attention import QK_NORM, QKV_BIAS
from hybridflow.architecture.mixers.known import MIXERS
from hybridflow.architecture.mixers.mixer import TokenMixer
from hybridflow.architecture.mlps.known import MLPS
from hybridflow.architecture.mlps.mlp import Mlp
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.tied_head import EMBEDDING, HEAD, OUTPUT
from hybridflow.architecture.weight import LAYERS, Shape, Table, Weight, at_top, hidden, in_layer, with_bias


def _vocab(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.vocab_size, spec.embedding_size),)


def _project_in(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.embedding_size),)


def _project_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.embedding_size, spec.hidden_size),)


def _positions(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_positions, spec.hidden_size),)


def _score(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.embedding_size),)


NORM_IN_QKV, NORM_IN_FC1 = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
# Transformer Engine fuses the norms into the linear layers that follow them.
FUSED_NAMES = {NORM_IN_QKV: "input_layernorm.", NORM_IN_FC1: "pre_mlp_layernorm."}
VECTOR = (Split.REPLICATED, hidden)

LM_HEAD = at_top(OUTPUT, HEAD, Split.VOCAB, _vocab)
VALUE_HEAD = at_top(OUTPUT, "score.weight", Split.REPLICATED, _score)
TOKENS = at_top(EMBEDDING, "model.embed_tokens.weight", Split.VOCAB, _vocab)
FINAL_NORM = at_top("decoder.final_layernorm.weight", "model.norm.weight", *VECTOR)
OPT_TOKENS = at_top(EMBEDDING, "model.decoder.embed_tokens.weight", Split.VOCAB, _vocab)
OPT_POSITIONS = at_top(
    "embedding.position_embeddings.weight", "model.decoder.embed_positions.weight", Split.REPLICATED, _positions
)
OPT_FINAL_NORM = tuple(
    at_top(f"decoder.final_layernorm.{kind}", f"model.decoder.final_layer_norm.{kind}", *VECTOR)
    for kind in ("weight", "bias")
)
PROJECT_IN = at_top(
    "embedding.word_embeddings.project_in.weight", "model.decoder.project_in.weight", Split.REPLICATED, _project_in
)
PROJECT_OUT = at_top("project_out.weight", "model.decoder.project_out.weight", Split.REPLICATED, _project_out)

INPUT_NORM = in_layer("input_layernorm.weight", "input_layernorm.weight", *VECTOR, stored=NORM_IN_QKV + "weight")
MLP_NORM = in_layer(
    "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", *VECTOR, stored=NORM_IN_FC1 + "weight"
)
BETWEEN_NORM = replace(  # where norms also stand behind, whose first has the name
    MLP_NORM, hf=(LAYERS + "pre_feedforward_layernorm.weight",), engine=LAYERS + "pre_feedforward_layernorm.weight"
)
NORMS_BEHIND = (  # the layers are in models.layer_specs
    in_layer("post_attention_layernorm.weight", "post_attention_layernorm.weight", *VECTOR),
    in_layer("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", *VECTOR),
)
OPT_INPUT_NORM = with_bias("input_layernorm", "self_attn_layer_norm", VECTOR, VECTOR, NORM_IN_QKV)
OPT_MLP_NORM = with_bias("pre_mlp_layernorm", "final_layer_norm", VECTOR, VECTOR, NORM_IN_FC1)
OPT_NORMS_BEHIND = (  # the layers are in models.layer_specs
    *with_bias("post_attention_layernorm", "self_attn_layer_norm", VECTOR, VECTOR),
    *with_bias("post_mlp_layernorm", "final_layer_norm", VECTOR, VECTOR),
)
UNFUSED = {norm: replace(norm, stored="") for norm in (INPUT_NORM, MLP_NORM)}  # others read what the norm gives, too
LAST = {"": (), "bias": (QKV_BIAS,), "norms": QK_NORM}
Norms = tuple[tuple[Weight, ...], tuple[Weight, ...], tuple[Weight, ...]]  # in front, between mixer and MLP, behind


@lru_cache(maxsize=64)
def table_of(spec: ModelSpec) -> Table:
    layers = {kind: _layer(spec, kind) for kind in spec.layer_kinds}
    if not spec.traits.linear_bias:
        return Table((TOKENS,), layers, (FINAL_NORM,))
    project_in, project_out = ((PROJECT_IN,), (PROJECT_OUT,)) if spec.projected_size else ((), ())
    final = () if spec.post_norm else OPT_FINAL_NORM
    return Table((OPT_TOKENS, *project_in, OPT_POSITIONS), layers, (*final, *project_out))


def _layer(spec: ModelSpec, kind: LayerKind) -> tuple[Weight, ...]:
    mixer, mlp = MIXERS[kind.mixer], MLPS[kind.mlp]
    front, between, behind = _opt_norms(spec) if spec.traits.linear_bias else _norms(spec, mixer, mlp)
    last = LAST[spec.traits.attention.last]
    mixing = mixer.weights(spec)
    first = (*front, *(weight for weight in mixing if weight not in last), *between, *mlp.weights(spec), *behind)
    return (*first, *(weight for weight in mixing if weight in last))


def _norms(spec: ModelSpec, mixer: TokenMixer, mlp: Mlp) -> Norms:
    place = spec.traits.norms.place
    if place == "behind":
        return (), (), NORMS_BEHIND
    front = INPUT_NORM if mixer.fuses_norm else UNFUSED[INPUT_NORM]
    if place == "around":
        return (front,), (BETWEEN_NORM,), NORMS_BEHIND
    return (front,), (MLP_NORM if mlp.fuses_norm else UNFUSED[MLP_NORM],), ()


def _opt_norms(spec: ModelSpec) -> Norms:
    return ((), OPT_NORMS_BEHIND[:2], OPT_NORMS_BEHIND[2:]) if spec.post_norm else (OPT_INPUT_NORM, OPT_MLP_NORM, ())
