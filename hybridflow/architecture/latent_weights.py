"""The weights of latent attention (MLA), for the table of weights.

    linear_qkv_a   [down projection of queries; of keys and values, whose last rows are the rotary key]: on every rank
    linear_q_b, linear_kv_b   by heads, of the two narrow vectors; linear_q and linear_kv_a where queries have none
    linear_proj    by heads

vLLM 0.32.0 holds the same under its own names, and views of kv_b_proj beside them.
"""

from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Shapes, Weight

LAYER, ATTENTION = "model.layers.{layer}.self_attn.", "decoder.layers.{layer}.self_attention."
# vLLM's parameters that are views of others: no trainer's memory is asked for them
DERIVED = ("W_UV", "W_UK_T")
NORMS, NORM_EPS = ("q_a_layernorm", "kv_a_layernorm"), 1e-6  # transformers' whatever rms_norm_eps says
WHOLE = ("self_attention.linear_qkv_a.weight", "self_attention.linear_kv_a.weight")  # linear layers on every rank
ABSORBED = "self_attention.linear_kv_b.weight"  # the engine multiplies it into queries and outputs, which adapters miss


def _sizes(spec: ModelSpec) -> LatentSizes:
    assert spec.latent is not None, f"{spec.family} has no latent attention"
    return spec.latent


def _query_rank(spec: ModelSpec) -> int:
    return _sizes(spec).query_rank or spec.hidden_size


def _kv_a(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_sizes(spec).cached, spec.hidden_size),)


def _qkv_a(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_query_rank(spec), spec.hidden_size), *_kv_a(spec))


def _q_b(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_heads * _sizes(spec).head_dim, _query_rank(spec)),)


def _kv_b(spec: ModelSpec) -> tuple[Shape, ...]:
    sizes = _sizes(spec)
    return ((spec.num_heads * (sizes.plain_dim + sizes.value_dim), sizes.key_rank),)


def _out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.num_heads * _sizes(spec).value_dim),)


def _q_norm(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_query_rank(spec),),)


def _kv_norm(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((_sizes(spec).key_rank,),)


def _weight(megatron: str, hf: str, split: Split, shapes: Shapes, engine: str = "") -> Weight:
    """hf: names of the parts, separated by spaces."""
    parts = tuple(f"{LAYER}{name}.weight" for name in hf.split())
    return Weight(f"{ATTENTION}{megatron}.weight", parts, f"{LAYER}{engine or hf}.weight", split, shapes)


KV_NORM = _weight("kv_a_layernorm", "kv_a_layernorm", Split.REPLICATED, _kv_norm)
KV_B = _weight("linear_kv_b", "kv_b_proj", Split.ROWS, _kv_b)
OUT = _weight("linear_proj", "o_proj", Split.COLUMNS, _out)
NARROW_QUERIES = (
    _weight("linear_qkv_a", "q_a_proj kv_a_proj_with_mqa", Split.REPLICATED, _qkv_a, engine="fused_qkv_a_proj"),
    _weight("q_a_layernorm", "q_a_layernorm", Split.REPLICATED, _q_norm),
    KV_NORM,
    _weight("linear_q_b", "q_b_proj", Split.ROWS, _q_b),
    KV_B,
    OUT,
)
WIDE_QUERIES = (
    _weight("linear_kv_a", "kv_a_proj_with_mqa", Split.REPLICATED, _kv_a),
    KV_NORM,
    _weight("linear_q", "q_proj", Split.ROWS, _q_b),
    KV_B,
    OUT,
)


def latent_attention(sizes: LatentSizes) -> tuple[Weight, ...]:
    """Of a layer."""
    return WIDE_QUERIES if sizes.query_rank is None else NARROW_QUERIES
