"""Floating-point operations of a model, from shapes alone, and the peaks of known devices. Pure.

    forward_flops(spec, lengths, outputs, head="lm")    2 k n of each product and token, 4 heads head_dim of each pair

A pair is a query with a key that causal attention looks at: length^2 / 2 of a row. A gated delta net reads and updates
a state of dk x dv a head in place of pairs: 6 heads dk dv a token. An update takes three times a
forward pass. These are the model's operations: what is computed again, or left out as prompts that rows share, changes
no count. Latent attention has 2 heads (size of q + size of v) of each pair, though kernels take v for as wide as q.
"""

from collections import Counter
from functools import cache

from torch import Tensor

from hybridflow.architecture.layer_kinds import LayerKind, Mixer
from hybridflow.architecture.spec import Head, ModelSpec

UPDATE = 3  # forward passes that an update is worth: the backward pass has two products for each
FROZEN_UPDATE = 2  # of a model whose weights have no gradients: one; adapters are left out
# FLOP/s without sparsity, float32 without TF32: data sheets, as automap/profiles has them. A device is known by a part
# of the name that CUDA has for the device, unless the name has a part of OTHERS, which are slower.
PEAKS = {
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
}
OTHERS = ("PCIe", "NVL", "MIG")


def layer_products(
    spec: ModelSpec, kind: LayerKind, *, tp: int = 1, expert_tp: int = 1
) -> list[tuple[float, float, float]]:
    """(k, n, share of the tokens) of a layer's products on a tensor-parallel rank: one for each expert of a token."""
    hidden, gates = float(spec.hidden_size), 2 if spec.traits.gated else 1

    def mlp(width: float, share: float = 1.0) -> list[tuple[float, float, float]]:
        return [(hidden, gates * width, share), (width, hidden, share)]

    attention = [(k, n, 1.0) for k, n in mixer_products(spec, kind.mixer, tp=tp)]
    size = spec.mlp_size(kind.mlp)
    everywhere = mlp(size / tp) if size else []
    if kind.mlp == "dense":
        return [*attention, *everywhere]
    experts = mlp(spec.ffn_hidden_size / expert_tp, expert_tp / tp) * spec.experts_per_token
    return [*attention, (hidden, float(spec.num_experts), 1.0), *experts, *everywhere]


def mixer_products(spec: ModelSpec, mixer: Mixer, *, tp: int = 1) -> list[tuple[float, float]]:
    """(k, n) of the products of a layer in front of what mixes the tokens, and behind."""
    hidden = float(spec.hidden_size)
    if mixer == "delta_net":
        assert spec.delta is not None, f"{spec.family} has no gated delta nets"
        into = 2 * (spec.delta.keys + spec.delta.values + spec.delta.value_heads)
        return [(hidden, into / tp), (spec.delta.values / tp, hidden)]
    if mixer == "latent":
        return _latent_products(spec, tp=tp)
    q, kv = spec.num_heads * spec.head_dim, max(spec.num_kv_heads, tp) * spec.head_dim
    return [(hidden, (spec.num_query_blocks * spec.head_dim + 2 * kv) / tp), (q / tp, hidden)]


def _latent_products(spec: ModelSpec, *, tp: int) -> list[tuple[float, float]]:
    assert spec.latent is not None, f"{spec.family} has no latent attention"
    hidden, sizes, heads = float(spec.hidden_size), spec.latent, spec.num_heads / tp
    return [
        (hidden, float(sizes.narrow)),  # whole on every rank
        (float(sizes.query_rank or hidden), heads * sizes.head_dim),
        (float(sizes.key_rank), heads * (sizes.plain_dim + sizes.value_dim)),
        (heads * sizes.value_dim, hidden),
    ]


def mixing_flops(spec: ModelSpec, mixer: Mixer, *, pairs: float, tokens: float) -> float:
    """Of a layer forward: 4 heads head_dim a pair (Dao et al. 2022), or 6 heads dk dv a token."""
    if mixer == "delta_net":
        assert spec.delta is not None, f"{spec.family} has no gated delta nets"
        return 6 * tokens * spec.delta.values * spec.delta.key_dim
    if mixer == "window":
        pairs = min(pairs, tokens * (spec.sliding_window or 0))  # the first tokens of a sequence reach fewer
    if mixer == "latent":
        assert spec.latent is not None, f"{spec.family} has no latent attention"
        return 2 * pairs * spec.num_heads * (spec.head_dim + spec.latent.value_dim)
    return 4 * pairs * spec.num_heads * spec.head_dim


def mean_mixing_flops(spec: ModelSpec, *, pairs: float, tokens: float) -> float:
    """Of a layer in the mean."""
    shares = mixer_shares(spec).items()
    return sum(share * mixing_flops(spec, mixer, pairs=pairs, tokens=tokens) for mixer, share in shares)


@cache
def mixer_shares(spec: ModelSpec) -> dict[Mixer, float]:
    """Of the layers, those with each kind of mixer."""
    counts = Counter(spec.layer_kind(layer).mixer for layer in range(spec.num_layers))
    return {mixer: count / spec.num_layers for mixer, count in counts.items()}


def forward_flops(spec: ModelSpec, lengths: Tensor, outputs: int, *, head: Head) -> float:
    """Of rows of these lengths, (N,), each run whole. outputs: tokens or rows that the head is read at."""
    tokens, pairs = int(lengths.sum()), float(lengths.double().square().sum()) / 2
    layers = Counter(map(spec.layer_kind, range(spec.num_layers)))
    products = sum(
        count * 2 * k * n * share * tokens
        for kind, count in layers.items()
        for k, n, share in layer_products(spec, kind)
    )
    columns = spec.vocab_size if head == "lm" else 1
    mixing = spec.num_layers * mean_mixing_flops(spec, pairs=pairs, tokens=tokens)
    return products + mixing + 2 * spec.embedding_size * columns * outputs


def peak_flops(device: str, dtype: str) -> float | None:
    """FLOP/s of a device by name; None where the device is not known."""
    if any(part in device for part in OTHERS):
        return None
    return next((peaks.get(dtype) for part, peaks in PEAKS.items() if part in device), None)
