"""What the engine has to know of the actor's adapters. vLLM is not imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hybridflow.architecture.adapter_weights import B
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import model_weights


@dataclass(frozen=True)
class EngineAdapters:
    """rank, scale: of all adapters.

    parts: by the engine's name of a linear layer: for each A of the layer, how many of vLLM's output partitions read
    A. More than one only where vLLM cuts a part further.
    """

    rank: int
    scale: float
    parts: Mapping[str, tuple[int, ...]]


def engine_adapters(spec: ModelSpec) -> EngineAdapters | None:
    """None: the model has none."""
    if spec.lora is None:
        return None
    found = [weight for weight in model_weights(spec, "lm") if weight.adapter == "b"]
    parts = {weight.engine.removesuffix(B): _runs_of_parts(weight, spec) for weight in found}
    return EngineAdapters(spec.lora.rank, spec.lora.scale, parts)


def _runs_of_parts(weight: Weight, spec: ModelSpec) -> tuple[int, ...]:
    rows = [shape[0] for shape in weight.shapes(spec)]
    if weight.runs is None:
        return (1,) * len(rows)
    ends = set(accumulate(rows))
    at = [0, *(i for i, end in enumerate(accumulate(weight.runs(spec)), start=1) if end in ends)]
    return tuple(stop - start for start, stop in pairwise(at))
