"""All token mixers by name. A mixer that lacks an answer cannot be made, and one without a case does not type-check."""

from collections import Counter
from functools import cache
from typing import assert_never, get_args

from hybridflow.architecture.layer_kinds import MixerName
from hybridflow.architecture.mixers.attention import AttentionMixer
from hybridflow.architecture.mixers.delta_net import DeltaNetMixer
from hybridflow.architecture.mixers.latent import LatentMixer
from hybridflow.architecture.mixers.mixer import CacheKind, TokenMixer
from hybridflow.architecture.mixers.window import WindowMixer
from hybridflow.architecture.spec import ModelSpec


def _made(name: MixerName) -> TokenMixer:
    match name:
        case "attention" | "unturned":  # rotation costs what it costs elsewhere
            return AttentionMixer()
        case "window":
            return WindowMixer()
        case "latent":
            return LatentMixer()
        case "delta_net":
            return DeltaNetMixer()
    assert_never(name)


MIXERS: dict[MixerName, TokenMixer] = {name: _made(name) for name in get_args(MixerName)}


@cache
def mixer_shares(spec: ModelSpec) -> dict[TokenMixer, float]:
    """Of the layers of a model, those with each mixer, in the order in which they come first."""
    counts = Counter(MIXERS[spec.layer_kind(layer).mixer] for layer in range(spec.num_layers))
    return {mixer: count / spec.num_layers for mixer, count in counts.items()}


def cache_kind(spec: ModelSpec, layer: int) -> CacheKind:
    """What the engine keeps of a sequence in a layer."""
    return MIXERS[spec.layer_kind(layer).mixer].cache(spec, tp=1, itemsize=1).kind
