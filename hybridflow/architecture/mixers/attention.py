"""Attention with keys and values of heads: multi-head and grouped-query attention (Ainslie et al. 2023).

With q, k = heads, key/value heads x head_dim, of a layer:

    products      q + 2 k columns of hidden, and with a gate q more; hidden columns of q
    flops         4 q a pair (Dao et al. 2022)
    activations   b (3 q + 3 k) + 4 heads: what linear_qkv gives (q + 2 k), rotated queries and keys (q + k, which on a
                  CPU mostly take the place of the first), what attention gives (q); log-sum-exps in float32.
                  Computed again: without the rotated ones and the log-sum-exps. With a gate: 2 q more, of the gate and
                  of what it gives, and the sigmoid in float32
    cache         2 k elements a token
    context       keys and values of all c ranks' tokens: 2 k elements of each travel. Two copies, the second in the
                  order in which the kernel reads; backward, gradients of both, for which flash attention has all query
                  heads in the place of fewer key/value heads
"""

from hybridflow.architecture.mixers.mixer import LayerCache, Product, TokenMixer
from hybridflow.architecture.shards import Split
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import LAYERS, OPT_LAYERS, Shape, Shapes, Weight, hidden, in_layer, with_bias

SUM_BYTES = 4  # of what is float32 whatever the model's dtype
# a prompt that samples share is kept once in whole blocks. On a CPU the least that vLLM takes, whose default is 128
# there; on CUDA the default
CPU_BLOCK, CUDA_BLOCK = 32, 16


def qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    kv = (spec.num_kv_heads * spec.head_dim, spec.hidden_size)
    return ((spec.num_query_blocks * spec.head_dim, spec.hidden_size), kv, kv)


def fused_qkv(spec: ModelSpec) -> tuple[Shape, ...]:
    """One part: queries, keys, values."""
    return ((sum(rows for rows, _ in qkv(spec)), spec.hidden_size),)


def qkv_bias(spec: ModelSpec) -> tuple[Shape, ...]:
    return tuple(shape[:1] for shape in qkv(spec))


def out(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.hidden_size, spec.num_heads * spec.head_dim),)


def head_dim(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.head_dim,),)


def query_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_heads * spec.head_dim,),)


def key_heads(spec: ModelSpec) -> tuple[Shape, ...]:
    return ((spec.num_kv_heads * spec.head_dim,),)


def _joined(kind: str, shapes: Shapes, at: str = LAYERS) -> Weight:
    """Queries, keys and values in one parameter. kind: weight or bias."""
    parts = " ".join(f"self_attn.{x}_proj.{kind}" for x in "qkv")
    return in_layer(
        f"self_attention.linear_qkv.{kind}", parts, Split.QKV, shapes, engine=f"self_attn.qkv_proj.{kind}", at=at
    )


QKV, QKV_BIAS = _joined("weight", qkv), _joined("bias", qkv_bias)
FUSED_QKV = in_layer("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", Split.QKV, fused_qkv)
OUT = in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Split.COLUMNS, out)
QK_NORM = tuple(
    in_layer(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", Split.REPLICATED, head_dim)
    for x in "qk"
)
WIDE_QK_NORM = tuple(  # over all heads: each of the engine's ranks has all of it
    in_layer(
        f"self_attention.{x}_layernorm.weight",
        f"self_attn.{x}_norm.weight",
        Split.ROWS,
        shapes,
        engine_split=Split.REPLICATED,
    )
    for x, shapes in (("q", query_heads), ("k", key_heads))
)
OPT_ATTENTION = (
    _joined("weight", qkv, OPT_LAYERS),
    _joined("bias", qkv_bias, OPT_LAYERS),
    *with_bias("self_attention.linear_proj", "self_attn.out_proj", (Split.COLUMNS, out), (Split.REPLICATED, hidden)),
)


class AttentionMixer(TokenMixer):
    """Of all tokens before a token, and of the token itself."""

    fuses_norm, title, gathers_again = True, "attention", True

    def weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        traits = spec.traits.attention
        if spec.traits.linear_bias:
            return OPT_ATTENTION
        bias = (QKV_BIAS,) if traits.bias else ()
        norms = WIDE_QK_NORM if traits.norms == "all" else QK_NORM if spec.qk_norm else ()
        return (FUSED_QKV if traits.fused else QKV, OUT, *bias, *norms)

    def products(self, spec: ModelSpec, *, tp: int, split: int = 1) -> list[Product]:
        hidden_size, q = float(spec.hidden_size), spec.num_heads * spec.head_dim
        kv = max(spec.num_kv_heads, tp) * spec.head_dim
        return [(hidden_size, (spec.num_query_blocks * spec.head_dim + 2 * kv) / tp), (q / tp, hidden_size)]

    def flops(self, spec: ModelSpec, *, pairs: float, tokens: float) -> float:
        return 4 * pairs * spec.num_heads * spec.head_dim

    def padding(self, spec: ModelSpec) -> float:
        return 1.0

    def elementwise(self, spec: ModelSpec) -> tuple[float, float]:
        return 0.0, 0.0

    def activation_bytes(self, spec: ModelSpec, *, again: bool, itemsize: int, over_ranks: bool) -> tuple[float, float]:
        q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        split = 2 * q + 2 * k if again else 3 * q + 3 * k
        log_sum_exp = 0 if again else SUM_BYTES * spec.num_heads
        gates = (2 * itemsize + SUM_BYTES) * q if spec.traits.attention.gate else 0
        return itemsize * split + log_sum_exp + gates, 0.0

    def cache(self, spec: ModelSpec, *, tp: int, itemsize: int) -> LayerCache:
        return LayerCache(2 * max(1, spec.num_kv_heads // tp) * spec.head_dim * itemsize)

    def block_tokens(self, *, cuda: bool) -> int:
        return CUDA_BLOCK if cuda else CPU_BLOCK

    def cache_words(self, spec: ModelSpec, *, tp: int, layers: int) -> str:
        heads = max(1, spec.num_kv_heads // tp)
        return f"2 (keys and values) x {layers} layers x {heads} key/value heads x head_dim {spec.head_dim}"

    def context_columns(self, spec: ModelSpec, tp: int) -> int:
        return 2 * max(spec.num_kv_heads // tp, 1) * spec.head_dim

    def context_tokens(self, spec: ModelSpec, *, tokens: float, pairs: float, ranks: int, split: int) -> float:
        return ranks * tokens

    def context_bytes(self, spec: ModelSpec, *, tp: int, ranks: int, itemsize: int, tokens: int, backward: bool) -> int:
        columns, of_queries = self.context_columns(spec, tp), 2 * spec.num_heads // tp * spec.head_dim
        grouped = of_queries if backward and of_queries > columns else 0
        return itemsize * ranks * tokens * ((2 if backward else 1) * 2 * columns + grouped)

    def context_heads(self, spec: ModelSpec, tp: int) -> int | None:
        return None

    def remade(self, spec: ModelSpec, tp: int) -> Product | None:
        return None
