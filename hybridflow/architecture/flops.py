"""Floating-point operations of a model, from shapes alone, and the peaks of known devices. Pure.

    forward_flops(spec, lengths, outputs, head="lm")    2 k n of each product and token, and what mixers count

A pair is a query with a key that causal attention looks at: length^2 / 2 of a row. An update takes three times a
forward pass. These are the model's operations: what is computed again, or left out as prompts that rows share, changes
no count.
"""

from collections import Counter

from torch import Tensor

from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.mixers.known import MIXERS, mixer_shares
from hybridflow.architecture.mlps.known import MLPS
from hybridflow.architecture.mlps.mlp import SharedProduct
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


def layer_products(spec: ModelSpec, kind: LayerKind, *, tp: int = 1, expert_tp: int = 1) -> list[SharedProduct]:
    """Of a layer on a tensor-parallel rank: one for each expert of a token."""
    mixing = [(k, n, 1.0) for k, n in MIXERS[kind.mixer].products(spec, tp=tp)]
    return [*mixing, *MLPS[kind.mlp].products(spec, tp=tp, expert_tp=expert_tp)]


def mean_mixing_flops(spec: ModelSpec, *, pairs: float, tokens: float, padded: bool = False) -> float:
    """Of a layer in the mean, forward, beside products. padded: what kernels do, in place of the model's operations."""
    return sum(
        share * mixer.flops(spec, pairs=pairs, tokens=tokens) * (mixer.padding(spec) if padded else 1.0)
        for mixer, share in mixer_shares(spec).items()
    )


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
