"""Gated delta nets, which keep a state in place of keys and values (Yang et al. 2024, arXiv 2412.06464).

With k, v = heads x dimensions of keys and values, n value heads, dk a key's dimension:

    weights       in_proj_qkvz and in_proj_ba are what vLLM has under these names: each rank's rows of every part
    products      2 k + 2 v + 2 n columns of hidden; hidden columns of v
    flops         6 v dk a token: a state of dk x dv a head is read and updated
    activations   b (6 k + 6 v + C n) + 4 (2 v + 2 n), with kernels that keep what is C tokens a chunk: what the
                  projections give (2 k + 2 v), convolved (2 k + v), of length 1 (2 k), outputs, their norm and the
                  product with the gate (3 v), the chunk's system; in float32 the gate, its silu, decays and rates
                  Computed again: b (2 k + 3 v + 2 n), what the projections give, and the product
    cache         the state in float32, and the last inputs of the convolution, of a sequence
    context       a rank has all tokens of a share of the heads: what the projections give and the outputs travel there
                  and back. What is sent and what arrives; backward, gradients of both
"""

from hybridflow.architecture.layer_kinds import DeltaSizes
from hybridflow.architecture.mixers.mixer import LayerCache, Product, TokenMixer
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Weight, in_layer

FLOAT_BYTES = 4  # of an element of a state, and of what is float32 whatever the model's dtype
CHUNK = 64  # tokens
CONVOLUTION = "self_attention.conv1d.weight"
NET = "linear_attn."  # of HuggingFace and the engine


def sizes_of(spec: ModelSpec) -> DeltaSizes:
    assert spec.delta is not None, f"{spec.family} has no gated delta nets"
    return spec.delta


def qkv_and_z(spec: ModelSpec) -> tuple[Shape, ...]:
    sizes = sizes_of(spec)
    return ((sum(sizes.runs), spec.hidden_size), (sizes.values, spec.hidden_size))


def qkvz_runs(spec: ModelSpec) -> tuple[int, ...]:
    return (*sizes_of(spec).runs, sizes_of(spec).values)


def b_and_a(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((sizes_of(spec).value_heads, spec.hidden_size),) * 2


def ba_runs(spec: ModelSpec) -> tuple[int, ...]:
    return (sizes_of(spec).value_heads,) * 2


def convolution(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((sum(sizes_of(spec).runs), 1, sizes_of(spec).kernel),)


def convolution_runs(spec: ModelSpec) -> tuple[int, ...]:
    return sizes_of(spec).runs


def heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((sizes_of(spec).value_heads,),)


def value_dim(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((sizes_of(spec).value_dim,),)


def out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, sizes_of(spec).values),)


WEIGHTS = (
    in_layer(
        "self_attention.in_proj_qkvz.weight",
        f"{NET}in_proj_qkv.weight {NET}in_proj_z.weight",
        Split.PARTS,
        qkv_and_z,
        engine=NET + "in_proj_qkvz.weight",
        runs=qkvz_runs,
    ),
    in_layer(
        "self_attention.in_proj_ba.weight",
        f"{NET}in_proj_b.weight {NET}in_proj_a.weight",
        Split.PARTS,
        b_and_a,
        engine=NET + "in_proj_ba.weight",
        runs=ba_runs,
    ),
    in_layer(CONVOLUTION, NET + "conv1d.weight", Split.PARTS, convolution, runs=convolution_runs),
    in_layer("self_attention.A_log", NET + "A_log", Split.ROWS, heads, float32=True),
    in_layer("self_attention.dt_bias", NET + "dt_bias", Split.ROWS, heads),
    in_layer("self_attention.out_norm.weight", NET + "norm.weight", Split.REPLICATED, value_dim),
    in_layer("self_attention.out_proj.weight", NET + "out_proj.weight", Split.COLUMNS, out),
)


class DeltaNetMixer(TokenMixer):
    fuses_norm = False  # two linear layers read what the norm gives
    title, gathers_again = "gated delta nets", False

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        return WEIGHTS

    def products(self, spec: ModelSpec, *, tp: int, split: int = 1) -> list[Product]:
        sizes, hidden_size = sizes_of(spec), float(spec.hidden_size)
        into = 2 * (sizes.keys + sizes.values + sizes.value_heads)
        return [(hidden_size, into / tp), (sizes.values / tp, hidden_size)]

    def flops(self, spec: ModelSpec, *, pairs: float, tokens: float) -> float:
        return 6 * tokens * sizes_of(spec).values * sizes_of(spec).key_dim

    def padding(self, spec: ModelSpec) -> float:
        return 1.0

    def elementwise(self, spec: ModelSpec) -> tuple[float, float]:
        return 0.0, 0.0

    def activation_bytes(self, spec: ModelSpec, *, again: bool, itemsize: int, over_ranks: bool) -> tuple[float, float]:
        keys, values, num_heads = sizes_of(spec).keys, sizes_of(spec).values, sizes_of(spec).value_heads
        if again:
            return itemsize * (2 * keys + 3 * values + 2 * num_heads), 0.0
        kept = itemsize * (6 * keys + 6 * values + CHUNK * num_heads)
        return kept + FLOAT_BYTES * (2 * values + 2 * num_heads), 0.0

    def cache(self, spec: ModelSpec, *, tp: int, itemsize: int) -> LayerCache:
        sizes = sizes_of(spec)
        inputs = sum(sizes.runs) // tp * (sizes.kernel - 1)
        return LayerCache(0, inputs * itemsize + sizes.values // tp * sizes.key_dim * FLOAT_BYTES)

    def block_tokens(self, *, cuda: bool) -> int:
        return 0

    def cache_words(self, spec: ModelSpec, *, tp: int, layers: int) -> str:
        return f"{layers} layers' states"

    def context_columns(self, spec: ModelSpec, tp: int) -> int:
        sizes = sizes_of(spec)
        return (2 * sizes.keys + 3 * sizes.values + 2 * sizes.value_heads) // tp

    def context_tokens(self, spec: ModelSpec, *, tokens: float, pairs: float, ranks: int, split: int) -> float:
        return tokens  # of c ranks each sends (c - 1) / c of them, as where all have 1 / c of what is gathered

    def context_bytes(self, spec: ModelSpec, *, tp: int, ranks: int, itemsize: int, tokens: int, backward: bool) -> int:
        return (2 if backward else 1) * 2 * itemsize * tokens * self.context_columns(spec, tp)

    def context_heads(self, spec: ModelSpec, tp: int) -> int | None:
        return sizes_of(spec).key_heads // tp

    def remade(self, spec: ModelSpec, tp: int) -> Product | None:
        return None
