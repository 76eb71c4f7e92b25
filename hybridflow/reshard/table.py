"""The weights of a model as the planner sees them: what matters of each, where it lies, and when it travels. Pure."""

from collections import Counter
from itertools import zip_longest
from typing import NamedTuple

from hybridflow.architecture.parts import matrix_of
from hybridflow.architecture.shards import Matrix, training_shard
from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import embedding, staged_weights
from hybridflow.parallel.layout import Group, Layout, RolloutLayout, Stages
from hybridflow.reshard.slices import engine_shard


class Kind(NamedTuple):
    """All that matters of a weight but the name."""

    matrix: Matrix
    is_vector: bool
    group: Group
    training: tuple[int, ...]  # the training stages that hold it
    engine: tuple[int, ...]  # the engine stages that need it


class PlannedWeight(NamedTuple):
    weight: Weight
    kind: Kind


def weight_table(spec: ModelSpec, training: Stages, engine: Stages) -> tuple[PlannedWeight, ...]:
    """Every weight of the language model, as `model_weights` orders them, and the stages it is on."""

    matrices: dict[tuple[object, ...], tuple[Matrix, bool]] = {}  # layers are alike

    def entry(weight: Weight, training_stages: tuple[int, ...], engine_stages: tuple[int, ...]) -> PlannedWeight:
        key = (weight.split, weight.part_shapes, weight.experts, weight.engine_split)
        if key not in matrices:
            matrices[key] = matrix_of(weight, spec), len(weight.shapes(spec)[0]) == 1
        return PlannedWeight(weight, Kind(*matrices[key], weight.group, training_stages, engine_stages))

    # tied, the output layer of the last stage is the embedding
    ends = [(0, len(stages) - 1) if spec.tied and len(stages) > 1 else (0,) for stages in (training, engine)]
    tied = embedding(spec)
    stages = zip(staged_weights(spec, "lm", training), staged_weights(spec, "lm", engine), strict=True)
    return tuple(
        entry(weight, *ends) if weight == tied else entry(weight, (training_stage,), (engine_stage,))
        for (weight, training_stage), (_, engine_stage) in stages
    )


def fill_buckets(
    table: tuple[PlannedWeight, ...], train: Layout, rollout: RolloutLayout, bucket_elements: int
) -> tuple[tuple[PlannedWeight, ...], ...]:
    """Weights of the training stages by turns, each stage's last first, so that every stage sends in every bucket.

    Megatron lays buffers out from the last weight to the first: they complete in this order. What a stage may
    send of a bucket is bounded as what a rank receives.
    """
    stages = [[entry for entry in reversed(table) if entry.kind.training[0] == stage] for stage in range(train.pp)]
    buckets: list[tuple[PlannedWeight, ...]] = []
    bucket: list[PlannedWeight] = []
    filled: Counter[tuple[str, int]] = Counter()  # ("engine" or "training", stage) -> elements of the bucket
    for entry in (entry for turn in zip_longest(*stages) for entry in turn if entry):
        matrix, group = entry.kind.matrix, entry.kind.group
        sizes = {  # alike on all ranks of a stage
            "engine": engine_shard(matrix, rollout.place(group, 0)).num_elements,
            "training": training_shard(matrix, train.places(group)[0]).num_elements,
        }
        stages_of = {"engine": entry.kind.engine, "training": entry.kind.training}
        added = Counter({(side, stage): sizes[side] for side in sizes for stage in stages_of[side]})
        if bucket and max((filled + added).values()) > bucket_elements:
            buckets.append(tuple(bucket))
            bucket, filled = [], Counter()
        bucket.append(entry)
        filled += added
    return (*buckets, tuple(bucket))
