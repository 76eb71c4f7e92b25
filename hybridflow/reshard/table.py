"""The weights of a model as the planner sees them: what matters of each, where it lies, and when it travels. Pure."""

from collections import Counter
from itertools import zip_longest
from typing import NamedTuple

from hybridflow.models.spec import ModelSpec
from hybridflow.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, Weight, layer_weights
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages
from hybridflow.reshard.slices import Matrix, engine_shard, matrix_of, training_shard


class Kind(NamedTuple):
    """All that matters of a weight but its name."""

    matrix: Matrix
    is_vector: bool
    training: tuple[int, ...]  # the training stages that hold it
    engine: tuple[int, ...]  # the engine stages that need it


class Entry(NamedTuple):
    weight: Weight
    kind: Kind


def weight_table(spec: ModelSpec, training: Stages, engine: Stages) -> tuple[Entry, ...]:
    """Every weight of the language model, as `model_weights` orders them, and the stages it is on."""

    def entry(weight: Weight, training_stages: tuple[int, ...], engine_stages: tuple[int, ...]) -> Entry:
        is_vector = len(weight.shapes(spec)[0]) == 1
        return Entry(weight, Kind(matrix_of(weight, spec), is_vector, training_stages, engine_stages))

    # tied, the output layer of the last stage is the embedding
    ends = [(0, len(stages) - 1) if spec.tied and len(stages) > 1 else (0,) for stages in (training, engine)]
    last = (len(training) - 1,), (len(engine) - 1,)
    table = [entry(EMBEDDING, *ends)]
    for layer in range(spec.num_layers):
        held = (_stage_of(layer, training),), (_stage_of(layer, engine),)
        table += [entry(weight, *held)._replace(weight=weight.for_layer(layer)) for weight in layer_weights(spec)]
    table.append(entry(FINAL_NORM, *last))
    return tuple(table if spec.tied else [*table, entry(LM_HEAD, *last)])


def _stage_of(layer: int, stages: Stages) -> int:
    return next(stage for stage, layers in enumerate(stages) if layer in layers)


def fill_buckets(
    table: tuple[Entry, ...], train: Layout, rollout: RolloutLayout, bucket_elements: int
) -> tuple[tuple[Entry, ...], ...]:
    """Weights of the training stages by turns, each stage's last first, so that every stage sends in every bucket.

    Megatron lays its buffers out from the last weight to the first: they complete in this order. What a stage may
    send of a bucket is bounded as what a rank receives.
    """
    stages = [[entry for entry in reversed(table) if entry.kind.training[0] == stage] for stage in range(train.pp)]
    buckets: list[tuple[Entry, ...]] = []
    bucket: list[Entry] = []
    filled: Counter[tuple[str, int]] = Counter()  # ("engine" or "training", stage) -> elements of the bucket
    for entry in (entry for turn in zip_longest(*stages) for entry in turn if entry):
        sizes = {  # alike on all tp ranks
            "engine": engine_shard(entry.kind.matrix, rollout.tp, 0).num_elements,
            "training": training_shard(entry.kind.matrix, train.tp, 0).num_elements,
        }
        stages_of = {"engine": entry.kind.engine, "training": entry.kind.training}
        added = Counter({(side, stage): sizes[side] for side in sizes for stage in stages_of[side]})
        if bucket and max((filled + added).values()) > bucket_elements:
            buckets.append(tuple(bucket))
            bucket, filled = [], Counter()
        bucket.append(entry)
        filled += added
    return (*buckets, tuple(bucket))
