"""Shapes of the parts of weights in a checkpoint, of a model's sizes."""

from hybridflow.architecture.layer_kinds import DeltaSizes, Mlp
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Shapes


def hidden(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size,),)


def head_dim(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.head_dim,),)


def vocab(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.vocab_size, spec.embedding_size),)


def project_in(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.embedding_size),)


def project_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.embedding_size, spec.hidden_size),)


def positions(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_positions, spec.hidden_size),)


def qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    kv = (spec.num_kv_heads * spec.head_dim, spec.hidden_size)
    return ((spec.num_query_blocks * spec.head_dim, spec.hidden_size), kv, kv)


def fused_qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    """One part: queries, keys, values."""
    return ((sum(rows for rows, _ in qkv(spec)), spec.hidden_size),)


def query_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_heads * spec.head_dim,),)


def key_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_kv_heads * spec.head_dim,),)


def qkv_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return tuple(shape[:1] for shape in qkv(spec))


def attention_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.num_heads * spec.head_dim),)


def gate_and_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size, spec.hidden_size),) * 2


def gate_up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((2 * spec.ffn_hidden_size, spec.hidden_size),)


def up(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size, spec.hidden_size),)


def up_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.ffn_hidden_size,),)


def down(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.ffn_hidden_size),)


def router(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_experts, spec.hidden_size),)


def router_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_experts,),)


def gate_and_up_of(mlp: Mlp) -> Shapes:
    """Of what every token of a layer goes through."""
    return lambda spec: ((spec.mlp_size(mlp), spec.hidden_size),) * 2


def down_of(mlp: Mlp) -> Shapes:
    return lambda spec: ((spec.hidden_size, spec.mlp_size(mlp)),)


def gate_of_shared_expert(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.hidden_size),)


def delta(spec: ModelSpec) -> DeltaSizes:
    assert spec.delta is not None, f"{spec.family} has no gated delta nets"
    return spec.delta


def delta_qkv_and_z(spec: ModelSpec) -> tuple[Shape, ...]:
    sizes = delta(spec)
    return ((sum(sizes.runs), spec.hidden_size), (sizes.values, spec.hidden_size))


def delta_qkvz_runs(spec: ModelSpec) -> tuple[int, ...]:
    return (*delta(spec).runs, delta(spec).values)


def delta_b_and_a(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((delta(spec).value_heads, spec.hidden_size),) * 2


def delta_ba_runs(spec: ModelSpec) -> tuple[int, ...]:
    return (delta(spec).value_heads,) * 2


def delta_convolution(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((sum(delta(spec).runs), 1, delta(spec).kernel),)


def delta_convolution_runs(spec: ModelSpec) -> tuple[int, ...]:
    return delta(spec).runs


def delta_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((delta(spec).value_heads,),)


def delta_value_dim(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((delta(spec).value_dim,),)


def delta_out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, delta(spec).values),)


def score(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((1, spec.embedding_size),)
