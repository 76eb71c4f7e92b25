"""The one table of weights: HuggingFace name <-> megatron name <-> engine name, split over ranks, and shape.

Conversion, loading, resharding and export read this table and nothing else. A parameter (`weight`) is made of one or
more parts, the tensors of a HuggingFace checkpoint: `parts` says where their rows lie in it, `shards` which rows and
columns of it a rank holds. The tables of the families are in `tables`.

vLLM holds what megatron's ranks hold, except QKV: [all q; all k; all v] of the rank, keys and values copied where ranks
outnumber them; and where a weight has an `engine_split`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from hybridflow.architecture.adapter_weights import adapter_weights
from hybridflow.architecture.layer_kinds import LayerKind
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.architecture.tables import FUSED_NAMES, LM_HEAD, VALUE_HEAD, table_of
from hybridflow.architecture.weight import Weight


def embedding(spec: ModelSpec) -> Weight:
    """Of the tokens."""
    return table_of(spec).embeddings[0]


def layer_weights(spec: ModelSpec, kind: LayerKind) -> tuple[Weight, ...]:
    """Of each layer of a kind."""
    stacked = len({table_of(spec).layers[each] for each in spec.layer_kinds}) == 1
    weights = (replace(weight, stacked=stacked).for_experts(spec.num_experts) for weight in table_of(spec).layers[kind])
    return tuple(each for weight in weights for each in (weight, *adapter_weights(weight, spec.lora)))


def is_trained(weight: Weight, spec: ModelSpec) -> bool:
    """Whether a model that is trained trains this weight: with adapters these and a value head alone."""
    return spec.lora is None or bool(weight.adapter) or weight == VALUE_HEAD


def head_weights(spec: ModelSpec, head: Head) -> tuple[Weight, ...]:
    """What comes last: nothing where the output layer is the embedding."""
    if head == "score":
        return (VALUE_HEAD,)
    return () if spec.tied else (LM_HEAD,)


def model_weights(spec: ModelSpec, head: Head) -> Iterator[Weight]:
    """Every parameter of a model with this head, in the order of the layers."""
    return (weight for weight, _ in staged_weights(spec, head, [range(spec.num_layers)]))


def staged_weights(spec: ModelSpec, head: Head, stages: Sequence[Sequence[int]]) -> Iterator[tuple[Weight, int]]:
    """`model_weights` with the first pipeline stage that holds each; stages: the layers of every stage."""
    table = table_of(spec)
    in_layers = {kind: _weights_of_layers(layer_weights(spec, kind), spec.num_layers) for kind in spec.layer_kinds}
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    yield from ((weight, 0) for weight in table.embeddings)
    for layer in range(spec.num_layers):
        yield from ((weight, stage_of[layer]) for weight in in_layers[spec.layer_kind(layer)][layer])
    yield from ((weight, len(stages) - 1) for weight in (*table.final, *head_weights(spec, head)))


@lru_cache(maxsize=16)  # a search asks for many stages of few models
def _weights_of_layers(in_layer: tuple[Weight, ...], num_layers: int) -> tuple[tuple[Weight, ...], ...]:
    return tuple(tuple(weight.for_layer(layer) for weight in in_layer) for layer in range(num_layers))


def frozen_weights(spec: ModelSpec, head: Head) -> frozenset[str]:
    """megatron's names of the weights that a model with adapters does not train; none of one without."""
    if spec.lora is None:
        return frozenset()
    return frozenset(weight.megatron for weight in model_weights(spec, head) if not is_trained(weight, spec))


def num_parameters(spec: ModelSpec, head: Head) -> int:
    """With the true vocabulary."""
    table = table_of(spec)
    kinds = Counter(map(spec.layer_kind, range(spec.num_layers)))
    in_layers = sum(count * _num_elements(layer_weights(spec, kind), spec) for kind, count in kinds.items())
    return in_layers + _num_elements((*table.embeddings, *table.final, *head_weights(spec, head)), spec)


def num_trained(spec: ModelSpec, head: Head) -> int:
    """Of a model with adapters: their elements, and a value head's."""
    return _num_elements((weight for weight in model_weights(spec, head) if is_trained(weight, spec)), spec)


def _num_elements(weights: Iterable[Weight], spec: ModelSpec) -> int:
    return sum(prod(shape) for weight in weights for shape in weight.shapes(spec))


def canonical_name(name: str) -> str:
    """The table's name of a megatron parameter: wrappers and Transformer Engine's fusions undone."""
    name = name.replace("module.", "")
    for fused, plain in FUSED_NAMES.items():
        name = name.replace(fused, plain)
    return name


def stored_at(weight: Weight) -> tuple[str, int | None]:
    """(key in a torch_dist checkpoint, index along its leading axis of layers); no index where it has no such axis.

    The keys are those that megatron-core 0.16.1 writes for layers that are all alike. Other layers have a key each.
    """
    if weight.layer is None:
        return weight.megatron, None
    prefix = f"decoder.layers.{weight.layer}."
    name = weight.stored or weight.megatron.removeprefix(prefix)
    return ("decoder.layers." + name, weight.layer) if weight.stacked else (prefix + name, None)
