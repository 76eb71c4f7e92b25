"""What the engine has to know of the actor's adapters. vLLM is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.architecture.adapter_weights import A
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weights import model_weights


@dataclass(frozen=True)
class EngineAdapters:
    """rank, scale: of all adapters. parts: by the engine's name of a linear layer, how many A it has."""

    rank: int
    scale: float
    parts: Mapping[str, int]


def engine_adapters(spec: ModelSpec) -> EngineAdapters | None:
    """None: the model has none."""
    if spec.lora is None:
        return None
    found = [weight for weight in model_weights(spec, "lm") if weight.adapter == "a"]
    parts = {weight.engine.removesuffix(A): len(weight.hf) for weight in found}
    return EngineAdapters(spec.lora.rank, spec.lora.scale, parts)
