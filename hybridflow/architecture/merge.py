"""Adapters merged into the weights that they belong to: W + scale B A, computed in float32 and rounded once."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from hybridflow.architecture.adapter_weights import modules_of
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.architecture.tables import VALUE_HEAD
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import model_weights

Named = Iterator[tuple[str, Tensor]]


def merged(tensors: Named, spec: ModelSpec, head: Head, adapters: dict[str, Tensor]) -> Named:
    """The weights of `spec.base`, from all tensors of `spec` in the table's order by their HuggingFace names.

    adapters: is given the matrices of the adapters and a value head, by name. Where `tensors` has nothing, as on a rank
    that gathers for others, nothing comes.
    """
    assert spec.lora is not None, "a model without adapters is as it is"
    for weight, matrices in _with_matrices(spec, head):
        parts = list(islice(tensors, len(weight.hf)))
        of_adapter = [list(islice(tensors, len(each.hf))) for each in matrices]
        for i, (name, part) in enumerate(parts):
            found = [each[i] for each in of_adapter]
            if weight == VALUE_HEAD:  # trained whole, beside the adapters
                adapters[name] = part
            if not found or not spec.lora.adapts(modules_of(weight)[i]):
                yield name, part
                continue
            adapters.update(found)
            (_, a), (_, b) = found
            yield name, merged_weight(part, a, b, spec.lora.scale)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """(out, in) of the weight's dtype."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def _with_matrices(spec: ModelSpec, head: Head) -> Iterator[tuple[Weight, list[Weight]]]:
    """Each weight of the base, with the matrices behind it."""
    base: Weight | None = None
    matrices: list[Weight] = []
    for weight in model_weights(spec, head):
        if weight.adapter:
            matrices.append(weight)
            continue
        if base is not None:
            yield base, matrices
        base, matrices = weight, []
    assert base is not None, "a model has weights"
    yield base, matrices
