"""Latent attention (MLA): keys and values are made of one narrow vector a token (DeepSeek-AI 2024, arXiv 2405.04434).

    linear_qkv_a   [down projection of queries; of keys and values, whose last rows are the rotary key]: on every rank
    linear_q_b, linear_kv_b   by heads, of the two narrow vectors; linear_q and linear_kv_a where queries have none
    linear_proj    by heads

vLLM 0.32.0 holds the same under its own names, and views of kv_b_proj beside them.

    flops         2 heads (size of q + size of v) a pair; kernels take v for as wide as q
    activations   own: the narrow vectors, and those of queries and of keys with values after their norms
                  of heads: queries, keys, values and outputs, all as wide as q; the part of the outputs that is v;
                  log-sum-exps. Computed again: queries, and keys with values, before they are turned; that part
    cache         the narrow vector and the rotary key of a token, on every rank
    context       the same travels, and each rank makes keys and values of all tokens of it. With two copies on the way;
                  backward, twice as much. Keys and values are made again, and the vectors that travel are kept besides
"""

from hybridflow.architecture.layer_kinds import LatentSizes
from hybridflow.architecture.mixers.mixer import LayerCache, Product, TokenMixer
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Shape, Shapes, Weight, in_layer

CPU_BLOCK, CUDA_BLOCK = 16, 64  # tokens: the only one of vLLM's CPU build; the most that a GPU's kernels have
LOG_SUM_EXP = 4  # bytes a head
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
    parts = " ".join(f"self_attn.{name}.weight" for name in hf.split())
    return in_layer(
        f"self_attention.{megatron}.weight", parts, split, shapes, engine=f"self_attn.{engine or hf}.weight"
    )


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


class LatentMixer(TokenMixer):
    fuses_norm = False  # two linear layers read what the norm gives
    title, gathers_again = "latent attention", True

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        return WIDE_QUERIES if _sizes(spec).query_rank is None else NARROW_QUERIES

    def products(self, spec: ModelSpec, *, tp: int, split: int = 1) -> list[Product]:
        hidden, sizes, heads = float(spec.hidden_size), _sizes(spec), spec.num_heads / tp
        return [
            (hidden, float(sizes.narrow) / split),  # whole on every rank
            (float(sizes.query_rank or hidden), heads * sizes.head_dim),
            (float(sizes.key_rank), heads * (sizes.plain_dim + sizes.value_dim)),
            (heads * sizes.value_dim, hidden),
        ]

    def flops(self, spec: ModelSpec, *, pairs: float, tokens: float) -> float:
        return 2 * pairs * spec.num_heads * (spec.head_dim + _sizes(spec).value_dim)

    def padding(self, spec: ModelSpec) -> float:
        return 2 * _sizes(spec).head_dim / (_sizes(spec).head_dim + _sizes(spec).value_dim)

    def elementwise(self, spec: ModelSpec) -> tuple[float, float]:
        """Norms of the narrow vectors; of each head v is padded, and cut again."""
        sizes = _sizes(spec)
        return 4.0 * spec.num_heads * sizes.value_dim, 4.0 * (sizes.narrow - sizes.rotary_dim)

    def activation_bytes(self, spec: ModelSpec, *, again: bool, itemsize: int, over_ranks: bool) -> tuple[float, float]:
        sizes, heads = _sizes(spec), spec.num_heads
        own = sizes.narrow + (sizes.query_rank or 0) + sizes.key_rank
        if over_ranks:
            own += sizes.cached
            if again:
                return itemsize * heads * (sizes.head_dim + sizes.value_dim), itemsize * own
            return heads * (itemsize * (2 * sizes.head_dim + sizes.value_dim) + LOG_SUM_EXP), itemsize * own
        if again:
            return itemsize * heads * (sizes.head_dim + sizes.plain_dim + 2 * sizes.value_dim), itemsize * own
        cut = sizes.value_dim if sizes.value_dim < sizes.head_dim else 0
        return heads * (itemsize * (4 * sizes.head_dim + cut) + LOG_SUM_EXP), itemsize * own

    def cache(self, spec: ModelSpec, *, tp: int, itemsize: int) -> LayerCache:
        return LayerCache(_sizes(spec).cached * itemsize)

    def block_tokens(self, *, cuda: bool) -> int:
        return CUDA_BLOCK if cuda else CPU_BLOCK

    def cache_words(self, spec: ModelSpec, *, tp: int, layers: int) -> str:
        sizes = _sizes(spec)
        return f"{layers} layers x (kv_lora_rank {sizes.key_rank} + qk_rope_head_dim {sizes.rotary_dim})"

    def context_columns(self, spec: ModelSpec, tp: int) -> int:
        return _sizes(spec).cached

    def context_tokens(self, spec: ModelSpec, *, tokens: float, pairs: float, ranks: int, split: int) -> float:
        return ranks * tokens / split

    def context_bytes(self, spec: ModelSpec, *, tp: int, ranks: int, itemsize: int, tokens: int, backward: bool) -> int:
        of_queries = 2 * spec.num_heads // tp * spec.head_dim
        return (2 if backward else 1) * 3 * itemsize * ranks * tokens * of_queries

    def context_heads(self, spec: ModelSpec, tp: int) -> int | None:
        return None

    def remade(self, spec: ModelSpec, tp: int) -> Product | None:
        """Keys and values of all heads."""
        return self.products(spec, tp=tp)[2]
