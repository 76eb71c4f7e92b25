"""Floating-point operations of a model, from shapes alone, and the peaks of known devices. Pure.

    forward_flops(spec, lengths, outputs, head="lm")    2 k n of each product and token, 4 heads head_dim of each pair

A pair is a query with a key that causal attention looks at: length^2 / 2 of a row. An update takes three times a
forward pass. These are the model's operations: what is computed again, or left out as prompts that rows share, changes
no count. Latent attention has 2 heads (size of q + size of v) of each pair, though kernels take v for as wide as q.
"""

from collections import Counter

from torch import Tensor

from hybridflow.architecture.layer_kinds import LayerKind
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

    attention = [(k, n, 1.0) for k, n in attention_products(spec, tp=tp)]
    size = spec.mlp_size(kind.mlp)
    everywhere = mlp(size / tp) if size else []
    if kind.mlp == "dense":
        return [*attention, *everywhere]
    experts = mlp(spec.ffn_hidden_size / expert_tp, expert_tp / tp) * spec.experts_per_token
    return [*attention, (hidden, float(spec.num_experts), 1.0), *experts, *everywhere]


def attention_products(spec: ModelSpec, *, tp: int = 1) -> list[tuple[float, float]]:
    """(k, n) of the products of attention of all tokens on a tensor-parallel rank."""
    hidden = float(spec.hidden_size)
    if spec.latent is None:
        q, kv = spec.num_heads * spec.head_dim, max(spec.num_kv_heads, tp) * spec.head_dim
        return [(hidden, (q + 2 * kv) / tp), (q / tp, hidden)]
    sizes, heads = spec.latent, spec.num_heads / tp
    return [
        (hidden, float(sizes.narrow)),  # whole on every rank
        (float(sizes.query_rank or hidden), heads * sizes.head_dim),
        (float(sizes.key_rank), heads * (sizes.plain_dim + sizes.value_dim)),
        (heads * sizes.value_dim, hidden),
    ]


def attention_flops(spec: ModelSpec, pairs: float) -> float:
    """Of a layer forward: 4 heads head_dim a pair (Dao et al. 2022)."""
    if spec.latent is not None:
        return 2 * pairs * spec.num_heads * (spec.head_dim + spec.latent.value_dim)
    return kernel_flops(spec, pairs)


def kernel_flops(spec: ModelSpec, pairs: float) -> float:
    """What kernels compute of a layer's attention forward: v is as wide as q."""
    return 4 * pairs * spec.num_heads * spec.head_dim


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
    return products + spec.num_layers * attention_flops(spec, pairs) + 2 * spec.embedding_size * columns * outputs


def peak_flops(device: str, dtype: str) -> float | None:
    """FLOP/s of a device by name; None where the device is not known."""
    if any(part in device for part in OTHERS):
        return None
    return next((peaks.get(dtype) for part, peaks in PEAKS.items() if part in device), None)
