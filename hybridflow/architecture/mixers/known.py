"""All token mixers by name. A mixer that lacks an answer cannot be made, and one without a case does not type-check."""

from collections import Counter
from functools import cache
from typing import assert_never, get_args

from hybridflow.architecture.layer_kinds import MixerName
from hybridflow.architecture.mixers.attention import Attention
from hybridflow.architecture.mixers.delta_net import DeltaNet
from hybridflow.architecture.mixers.latent import LatentAttention
from hybridflow.architecture.mixers.mixer import CacheKind, Mixer
from hybridflow.architecture.mixers.window import WindowAttention
from hybridflow.architecture.spec import ModelSpec


def _made(name: MixerName) -> Mixer:
    match name:
        case "attention" | "unturned":  # rotation costs what it costs elsewhere
            return Attention()
        case "window":
            return WindowAttention()
        case "latent":
            return LatentAttention()
        case "delta_net":
            return DeltaNet()
    assert_never(name)


MIXERS: dict[MixerName, Mixer] = {name: _made(name) for name in get_args(MixerName)}


@cache
def mixer_shares(spec: ModelSpec) -> dict[Mixer, float]:
    """Of the layers of a model, those with each mixer, in the order in which they come first."""
    counts = Counter(MIXERS[spec.layer_kind(layer).mixer] for layer in range(spec.num_layers))
    return {mixer: count / spec.num_layers for mixer, count in counts.items()}


def cache_kind(spec: ModelSpec, layer: int) -> CacheKind:
    """What the engine keeps of a sequence in a layer."""
    return MIXERS[spec.layer_kind(layer).mixer].cache(spec, tp=1, itemsize=1).kind
