"""What saving takes, from shapes alone: the bytes that each rank writes, and how many checkpoints are kept. Pure.

    written_bytes(model, bucket_bytes=...)    by rank; with checkpoint.async_save also what it copies to host memory

As `checkpoint.sharded.prepare_save` deals it out: of what ranks hold alike one copy is written. Copies of the model
share the weights, whole parameters each; so they do with optimizer state, unless ZeRO-1 has it lie in shares, of which
each is written where it lies. Not counted: a kilobyte a tensor that describes it, and the tokenizer.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil, lcm, prod
from typing import Any

from hybridflow.architecture.parts import shard_shape
from hybridflow.architecture.shards import Split
from hybridflow.architecture.tables import table_of
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import embedding, head_weights, is_trained, layer_weights, staged_weights
from hybridflow.batch import balanced_partition
from hybridflow.config import CheckpointConfig, OptimizerConfig, TrainedRoleConfig
from hybridflow.parallel.host_memory import packed_bytes
from hybridflow.parallel.layout import GROUPS, Group, TrainingCoordinates
from hybridflow.placement.footprint import ITEM_BYTES, MAIN_BYTES, optimizer_bytes
from hybridflow.placement.placed import PlacedModel, PlacedModels

STEPS_BYTES = 8  # the number of optimizer steps
MANY_ITERATIONS = 1 << 20
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements, in megatron-core 0.16.1 with ZeRO-1

# The order in which a layer of megatron registers modules, and so fills buckets; Transformer Engine's layers
# have their norms within the linear modules, which moves the border of a share by as much.
REGISTERED = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.A_log", "self_attention.dt_bias", "self_attention.in_proj_qkvz", "self_attention.in_proj_ba"),
    *("self_attention.conv1d", "self_attention.out_norm", "self_attention.out_proj"),
    *("self_attention.linear_kv_a", "self_attention.q_a_layernorm", "self_attention.linear_q"),
    *("self_attention.kv_a_layernorm", "self_attention.linear_kv_b"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm", "mlp"),
    *("post_attention_layernorm", "post_mlp_layernorm"),
)


def written_bytes(model: PlacedModel, *, bucket_bytes: int | None) -> dict[int, int]:
    """By rank of the model's grid. bucket_bytes: of the buckets that the weights lie in; None: there is one."""
    found = {rank: sum(sizes) for rank, sizes in written_sizes(model, bucket_bytes=bucket_bytes).items()}
    if isinstance(model.config, TrainedRoleConfig):
        found[model.layout.ranks[0]] += STEPS_BYTES
    return found


def written_sizes(model: PlacedModel, *, bucket_bytes: int | None) -> dict[int, tuple[int, ...]]:
    """By rank of the model's grid: the bytes of each tensor that the rank writes, in their order."""
    layout, found = model.layout, {}
    stages = [_Stage(model, stage, bucket_bytes) for stage in range(layout.pp)]
    # of the other tensor-parallel ranks none writes what all hold
    alike: dict[tuple[int, int, int, bool], tuple[int, ...]] = {}
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        key = (at.pp, layout.copy_index("dense", at), layout.copy_index("experts", at), at.tp > 0)
        if key not in alike:
            alike[key] = tuple(stages[at.pp].sizes_of(at))
        found[rank] = alike[key]
    return found


def copied_bytes(run: PlacedModels) -> dict[int, int]:
    """By rank: host memory for the copies that checkpoint.async_save makes of what the rank writes, and keeps.

    A tensor is taken to be in one piece; ZeRO-1 may have it in several, which leave less room unused.
    """
    sizes: dict[int, list[int]] = {rank: [] for rank in range(run.world_size)}
    for model, bucket_bytes in _saved(run):
        for rank, own in written_sizes(model, bucket_bytes=bucket_bytes).items():
            sizes[rank] += own
    return {rank: packed_bytes(own, locked=run.cuda) for rank, own in sizes.items()}


def _saved(run: PlacedModels) -> Iterator[tuple[PlacedModel, int | None]]:
    """(model, bytes of its buckets), in the order in which a checkpoint has them."""
    for name, model in run.models.items():
        if isinstance(model.config, TrainedRoleConfig) or (run.config.algorithm.kl.resets and name == "reference"):
            yield model, run.config.bucket_bytes(cuda=True) if name == "actor" else None


def most_kept(config: CheckpointConfig, num_iterations: int) -> int:
    """Checkpoints that lie on the disk at a time, at most: those that are kept, and the one that is being written.

    Where none is saved but when a run has to stop, it is that one.
    """
    interval, every = config.save_interval, config.keep_every
    if not interval:
        return 1 if config.save_minutes is None else min(num_iterations, config.keep_last + config.keep_best + 1)
    saved = ceil(num_iterations / interval)  # the last iteration is saved too
    also = 0
    if every:
        also = num_iterations // lcm(interval, every)
        also += num_iterations % interval != 0 and num_iterations % every == 0
    return min(saved, config.keep_last + config.keep_best + also + 1)


@dataclass(frozen=True)
class _Stage:
    """The weights of a pipeline stage; those that several ranks hold alike are counted where they are written."""

    model: PlacedModel
    number: int
    bucket_bytes: int | None

    def sizes_of(self, at: TrainingCoordinates) -> Iterator[int]:
        """Bytes of the tensors that a rank of this stage writes: each weight, and its state in float32."""
        for i, weight in enumerate(self._weights):
            if weight == self._copy or (weight.split is Split.REPLICATED and at.tp > 0):
                continue
            copy = self.model.layout.copy_index(weight.group, at)
            own = self._sizes[weight] if i in self._dealt[weight.group][copy] else 0
            state = 0 if _is_constant(weight) else self._shares[weight][copy] if self._zero1 else own
            dtype = "float32" if weight.float32 else self.model.config.dtype
            yield from [ITEM_BYTES[dtype] * own] * (own > 0)
            yield from [MAIN_BYTES * state] * (self._state_bytes(dtype) // MAIN_BYTES if state else 0)

    @property
    def _optimizer(self) -> OptimizerConfig | None:
        """None: the model is not trained, as a reference that is reset."""
        return self.model.config.optimizer if isinstance(self.model.config, TrainedRoleConfig) else None

    @property
    def _itemsize(self) -> int:
        return ITEM_BYTES[self.model.config.dtype]

    @property
    def _zero1(self) -> bool:
        return self._optimizer is not None and self._optimizer.zero1 and self._optimizer.name == "adam"

    def _state_bytes(self, dtype: str) -> int:
        """Of the optimizer, an element of a weight of this dtype."""
        return 0 if self._optimizer is None else optimizer_bytes(1, self._optimizer, dtype=dtype, copies=1)

    @property
    def _is_last(self) -> bool:
        return self.number == self.model.layout.pp - 1

    @cached_property
    def _copy(self) -> Weight | None:
        """The embedding, where this is the last of several stages and has it again as the output layer."""
        spec = self.model.spec
        again = spec.lora is None and spec.tied and self.model.head == "lm" and self._is_last and self.number > 0
        return embedding(spec) if again else None

    @cached_property
    def _weights(self) -> list[Weight]:
        """In the order of the table."""
        spec, stages = self.model.spec, self.model.layout.stages(self.model.spec.num_layers)
        staged = staged_weights(spec, self.model.head, stages)
        own = [weight for weight, stage in staged if stage == self.number and is_trained(weight, spec)]
        return own if self._copy is None else [self._copy, *own]

    @cached_property
    def _sizes(self) -> Mapping[Weight, int]:
        return {weight: prod(shard_shape(weight, self.model.spec, self.model.layout.cut)) for weight in self._weights}

    @cached_property
    def _dealt(self) -> Mapping[Group, list[set[int]]]:
        """The weights that the holders of each copy write."""
        found: dict[Group, list[set[int]]] = {}
        for group in GROUPS:
            numbers = [i for i, weight in enumerate(self._weights) if weight.group == group]
            sizes = [self._sizes[self._weights[i]] for i in numbers]
            dealt = balanced_partition(sizes, self.model.layout.copies(group))
            found[group] = [{numbers[i] for i in part} for part in dealt]
        return found

    @cached_property
    def _shares(self) -> Mapping[Weight, list[int]]:
        """With ZeRO-1: the elements of each weight whose state the holders of each copy have."""
        found: dict[Weight, list[int]] = {}
        elements = None if self.bucket_bytes is None else self.bucket_bytes // self._itemsize
        tied = self.model.spec.tied and self.model.head == "lm" and self.model.layout.pp > 1
        for chunk in self._registered():
            for buffer, copies in self._buffers(chunk):
                alone = {i for i, weight in enumerate(buffer) if tied and weight == embedding(self.model.spec)}
                sizes = [self._sizes[weight] for weight in buffer]
                shares = zero1_shares(sizes, alone=alone, bucket_elements=elements, copies=copies)
                found |= dict(zip(buffer, shares, strict=True))
        return found

    def _buffers(self, chunk: list[Weight]) -> Iterator[tuple[list[Weight], int]]:
        """(weights, holders of copies) of megatron's buffers: of one dtype; of experts that replicas share, or not."""
        layout, narrow = self.model.layout, self.model.config.dtype != "float32"
        for float32 in (False, True):
            alike = [weight for weight in chunk if (narrow and weight.float32) == float32]
            if layout.dense_per_expert_copy == 1:
                yield alike, layout.copies("dense")
                continue
            for group in GROUPS:
                yield [weight for weight in alike if weight.group == group], layout.copies(group)

    def _registered(self) -> Iterator[list[Weight]]:
        """The weights of each model chunk, in megatron's order."""
        spec = self.model.spec
        chunks = self.model.layout.chunks(spec.num_layers)[self.number]
        table = table_of(spec)
        in_layer = {kind: sorted(layer_weights(spec, kind), key=_registered_at) for kind in spec.layer_kinds}
        for i, layers in enumerate(chunks):
            weights = list(table.embeddings) if self.number == i == 0 else []
            weights += [weight.for_layer(layer) for layer in layers for weight in in_layer[spec.layer_kind(layer)]]
            if self._is_last and i == len(chunks) - 1:
                weights += [*table.final, *head_weights(spec, self.model.head)]
                weights += [] if self._copy is None else [self._copy]
            yield [weight for weight in weights if is_trained(weight, spec) and not _is_constant(weight)]


def _is_constant(weight: Weight) -> bool:
    """A router's bias, which no step changes and of which no optimizer has a state."""
    return weight.megatron.endswith("router.expert_bias")


def _registered_at(weight: Weight) -> int:
    name = weight.megatron.removeprefix("decoder.layers.{layer}.")
    return next(i for i, prefix in enumerate(REGISTERED) if name.startswith(prefix))


def zero1_shares(
    sizes: Sequence[int], *, alone: Collection[int], bucket_elements: int | None, copies: int
) -> list[list[int]]:
    """How many elements of each parameter the optimizer of every copy steps, as megatron-core 0.16.1 cuts the buffer.

    From the last parameter to the first they fill buckets, which end where they have `bucket_elements` or more, and
    before and after a parameter of `alone`. Parameters and buckets are padded; of each bucket copy i has the i-th of
    as many equal runs.
    """
    found = [[0] * copies for _ in sizes]
    begin = end = 0  # of the bucket
    bucket: list[tuple[int, int]] = []  # (parameter, start)

    def closed() -> int:
        stop = _padded(end, lcm(copies, BUCKET_ALIGNMENT))
        bounds = [begin, *accumulate([(stop - begin) // copies] * copies, initial=begin)][1:]
        for parameter, start in bucket:
            found[parameter] = [
                max(0, min(start + sizes[parameter], bounds[i + 1]) - max(start, bounds[i])) for i in range(copies)
            ]
        bucket.clear()
        return stop

    for parameter in reversed(range(len(sizes))):
        start = end = _padded(end, PARAMETER_ALIGNMENT)
        if parameter in alone and bucket:
            start = begin = closed()
        bucket.append((parameter, start))
        end = start + sizes[parameter]
        if parameter in alone or (bucket_elements is not None and end - begin >= bucket_elements):
            begin = end = closed()
    if bucket:
        closed()
    return found


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def checkpoint_report(run: PlacedModels) -> dict[str, Any]:
    """Of one checkpoint, and of all that lie on the disk at a time. host_bytes: copies, by checkpoint.async_save."""
    config, written = run.config.checkpoint, dict.fromkeys(range(run.world_size), 0)
    for model, bucket_bytes in _saved(run):
        for rank, size in written_bytes(model, bucket_bytes=bucket_bytes).items():
            written[rank] += size
    # of a run of so many passes only the data tells the number of iterations
    num_iterations = run.config.num_iterations or MANY_ITERATIONS
    num_kept, of_ranks = most_kept(config, num_iterations), spread(written.values())
    return {
        "save_interval": config.save_interval,
        "save_minutes": config.save_minutes,
        "async_save": config.async_save,
        "rank_bytes": of_ranks,
        "host_bytes": of_ranks if config.async_save else None,
        "num_kept": num_kept,
        "kept_bytes": num_kept * of_ranks["total"],
    }


def spread(values: Iterable[int]) -> dict[str, Any]:
    found = list(values)
    return {"min": min(found), "max": max(found), "mean": sum(found) // len(found), "total": sum(found)}
