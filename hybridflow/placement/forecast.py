"""What a placed run will mean, before any process starts: grids, memory per GPU, and the reshard. Pure.

forecast(place(config, 64))    all that `hybridflow.plan` prints, as lists and dicts for JSON; bytes throughout
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weights import num_parameters, num_trained
from hybridflow.config import ExperimentConfig, RoleConfig, TrainedRoleConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.parallel.layout import Cut, RolloutLayout, Stages
from hybridflow.parallel.ranks import shown
from hybridflow.placement.footprint import (
    ITEM_BYTES,
    Footprint,
    engine_activation_bytes,
    forward_activation_bytes,
    gradient_bytes,
    model_elements,
    sampler_bytes,
    stage_elements,
    stage_optimizer_bytes,
    staged_bytes,
    together,
    training_activation_bytes,
)
from hybridflow.placement.margin import Margin, Margins, most_words
from hybridflow.placement.placed import PlacedModel, PlacedModels, PlacedRun
from hybridflow.placement.reshard import EngineHoldings, ReshardForecast, formulas
from hybridflow.placement.saving import checkpoint_report, spread
from hybridflow.reshard.plan import plan_reshard
from hybridflow.rollout.runner import second_runner

Report = dict[str, Any]
Moments = dict[str, Callable[[int], dict[str, Footprint]]]  # what lies on a rank in each moment, by role


def forecast(run: PlacedModels) -> Report:
    """Roles, memory and checkpoints of a run; rollout and reshard where there is an engine."""
    memory = memory_of(run)
    engine: Report = {}
    if isinstance(memory, RunMemory):
        engine = {"rollout": _rollout_report(memory.rollout, memory.run.stages), "reshard": _reshard_report(memory)}
    return {
        "name": run.config.name,
        "world_size": run.world_size,
        "roles": [_role_report(model) for model in run.models.values()],
        "libraries": most_words(run),
        "memory": {moment: _memory_report(rows, run.world_size) for moment, rows in memory.moments().items()},
        "checkpoint": checkpoint_report(run),
        **engine,
    }


# ------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class RoleMemory:
    """What a role holds on a rank of each pipeline stage."""

    model: PlacedModel
    max_length: int  # tokens of the longest sequence
    rows: int  # most sequences of a replica that are computed together: a mini-batch, or a batch where none is trained
    shares_base: bool = False  # whether another role on the same ranks holds the weights that are frozen

    @cached_property
    def training(self) -> tuple[Footprint, ...]:
        """Of each stage, while models train."""
        elements = stage_elements(self.model.spec, self.model.head, self.model.layout, trained=self.shares_base)
        return tuple(self._training(stage, count) for stage, count in enumerate(elements))

    def _training(self, stage: int, elements: int) -> Footprint:
        spec, layout, config = self.model.spec, self.model.layout, self.model.config
        itemsize, replica_tokens = ITEM_BYTES[config.dtype], ceil(self.rows * self.max_length / layout.cp)
        tokens = min(ceil(config.micro_batch_tokens / layout.cp), replica_tokens)  # of a rank
        if not isinstance(config, TrainedRoleConfig):
            activations = forward_activation_bytes(
                spec,
                layout,
                stage,
                head=self.model.head,
                itemsize=itemsize,
                sequence_parallel=config.sequence_parallel,
                tokens=tokens,
            )
            return Footprint(weights=itemsize * elements, activations=activations)
        state = stage_optimizer_bytes(spec, self.model.head, layout, config)[stage]
        return Footprint(
            weights=itemsize * elements,
            gradients=gradient_bytes(stage_elements(spec, self.model.head, layout, trained=True)[stage]),
            optimizer=staged_bytes(state) if config.offload_optimizer == "always" else state,
            activations=training_activation_bytes(
                spec,
                layout,
                stage,
                head=self.model.head,
                itemsize=itemsize,
                sequence_parallel=config.sequence_parallel,
                recompute=config.recompute,
                tokens=tokens,
                replica_tokens=replica_tokens,
            ),
        )

    def at_rest(self, stage: int) -> Footprint:
        """While the engine generates: without activations and what is offloaded."""
        return resting(self.training[stage], self.model.config)


def resting(held: Footprint, config: RoleConfig) -> Footprint:
    """Of what a role holds while models train, that which is left while the engine generates."""
    if not isinstance(config, TrainedRoleConfig):
        return Footprint(held.weights)
    return Footprint(
        weights=held.weights,
        gradients=0 if config.offload_gradients else held.gradients,
        optimizer=0 if config.offload_optimizer else held.optimizer,
    )


class ModelMemory:
    """What lies on every rank of a run without an engine: there is no moment but training."""

    def __init__(self, run: PlacedModels) -> None:
        self._world_size, self.margin = run.world_size, Margins(run)
        shared = {"critic"} if run.critic_shares_base else set[str]()
        self.roles = {name: role_memory(run.config, model, name in shared) for name, model in run.models.items()}

    def one_of_each(self) -> list[int]:
        """Ranks such that each other one holds what one of them does, ascending: the first of each standing."""
        first: dict[Hashable, int] = {}
        for rank in range(self._world_size):
            first.setdefault(self._standing(rank), rank)
        return list(first.values())

    def moments(self) -> Moments:
        """What lies on a rank in each moment, by role."""
        return {"training": self._training}

    def _standing(self, rank: int) -> Hashable:
        return tuple((name, stage) for name, _, stage in self._on(rank)), self.margin(rank)

    def _training(self, rank: int) -> dict[str, Footprint]:
        return {name: role.training[stage] for name, role, stage in self._on(rank)}

    def _on(self, rank: int) -> Iterator[tuple[str, RoleMemory, int]]:
        """(name, role, pipeline stage) of what lies on a rank."""
        for name, role in self.roles.items():
            if rank in role.model.layout:
                yield name, role, role.model.layout.coordinates(rank).pp


class RunMemory(ModelMemory):
    """What lies on every rank of a run with an engine, and what the reshard takes."""

    def __init__(self, run: PlacedRun) -> None:
        super().__init__(run)
        self.run, self.actor, self.rollout = run, run.actor, run.rollout
        self._beside = run.config.generates_beside  # then ranks train or generate, all the time
        self.itemsize = ITEM_BYTES[self.actor.config.dtype]
        bucket_elements = run.config.rollout.bucket_bytes(cuda=True) // self.itemsize
        layouts, dtype = (self.actor.layout, self.rollout), self.actor.config.dtype
        self.plan = plan_reshard(self.actor.spec, *layouts, bucket_elements=bucket_elements, dtype=dtype)
        self.storage_elements = storage_elements(run.config)
        self.holdings = EngineHoldings(
            self.plan, self.actor.spec, itemsize=self.itemsize, bucket_elements=self.storage_elements
        )

    @cached_property
    def reshard(self) -> ReshardForecast:
        """With what is under way, which no moment has."""
        return ReshardForecast(
            self.plan, self.actor.spec, itemsize=self.itemsize, bucket_elements=self.storage_elements
        )

    def _standing(self, rank: int) -> Hashable:
        return super()._standing(rank), self.holdings.standing(rank) if rank in self.rollout else None

    def moments(self) -> Moments:
        """See `ModelMemory`."""
        return super().moments() | {"generation": self._generation}

    def _training(self, rank: int) -> dict[str, Footprint]:
        rows = super()._training(rank)
        if rank in self.rollout and self.run.config.rollout.sleep_level == 0 and not self._beside:
            sampler = kept_by_sampler(self.run.config, self.actor.spec, pp=self.rollout.pp)
            rows["engine"] = Footprint(activations=sampler, kv_cache=self._kv_cache(rank))
        return rows

    def _generation(self, rank: int) -> dict[str, Footprint]:
        rows = {} if self._beside else {name: role.at_rest(stage) for name, role, stage in self._on(rank)}
        if rank in self.rollout:
            own, released = self.holdings.own_and_released(rank)
            if "actor" in rows:
                held = rows["actor"]
                rows["actor"] = Footprint(held.weights - released, held.gradients, held.optimizer)
            rows["engine"] = Footprint(
                weights=own,
                activations=engine_bytes(self.run.config, self.actor.spec, cut=self.rollout.cut, pp=self.rollout.pp),
                kv_cache=self._kv_cache(rank),
            )
        return rows

    def _kv_cache(self, rank: int) -> int:
        return self.run.kv_cache.of_stage(self.run.stages, self.rollout.coordinates(rank).pp)


def storage_elements(config: ExperimentConfig) -> int:
    """Of the buckets that the actor's weights lie in; 0: each weight has a storage of its own, as without ZeRO-1."""
    optimizer = config.actor.optimizer
    one_bucket = config.rollout.bucket_bytes(cuda=True) // ITEM_BYTES[config.actor.dtype]
    return one_bucket if optimizer.zero1 and optimizer.name == "adam" else 0


def engine_bytes(config: ExperimentConfig, actor: ModelSpec, *, cut: Cut, pp: int) -> int:
    """What an engine rank takes beside weights and the KV cache while it generates."""
    activations = engine_activation_bytes(
        actor,
        cut=cut,
        itemsize=ITEM_BYTES[config.actor.dtype],
        tokens=config.rollout.batched_tokens(config.max_sequence_length, cuda=True),
        sequences=config.rollout.sequences_of_step(config.rows_of_replica(), cuda=True),
    )
    return activations + kept_by_sampler(config, actor, pp=pp)


def kept_by_sampler(config: ExperimentConfig, actor: ModelSpec, *, pp: int) -> int:
    cuts = config.algorithm.policy.replay_routing and config.rollout.partial is not None
    if not second_runner(config.sampling, cuda=True, pp=pp, cuts_routes=cuts):
        return 0
    return sampler_bytes(actor, sequences=config.rollout.sequences_of_step(config.rows_of_replica(), cuda=True))


def memory_of(run: PlacedModels) -> ModelMemory:
    return RunMemory(run) if isinstance(run, PlacedRun) else ModelMemory(run)


def role_memory(config: AnyConfig, model: PlacedModel, shares_base: bool = False) -> RoleMemory:
    rows = ceil(rows_together(config, model.config) / model.layout.dp)
    return RoleMemory(model, config.max_sequence_length, rows, shares_base)


def rows_together(config: AnyConfig, role: RoleConfig) -> int:
    """Most sequences that all replicas of a role compute in one go: of an optimizer step, or of an iteration."""
    return config.mini_batch_size if isinstance(role, TrainedRoleConfig) else config.batch_size


@dataclass(frozen=True)
class Fullest:
    """The rank with most bytes at a time, the moment of it, what takes them by role, and what libraries take there."""

    rank: int
    moment: str
    roles: Mapping[str, Footprint]
    margin: Margin

    @property
    def bytes(self) -> int:
        return together(list(self.roles.values())).total

    @property
    def needed(self) -> int:
        """Bytes, those of libraries too."""
        return self.bytes + self.margin.total


def fullest(run: PlacedModels) -> Fullest:
    """With libraries. The first of those alike, as in the table of `hybridflow.plan`."""
    memory = memory_of(run)
    return max(peaks(memory, memory.one_of_each()), key=lambda each: (each.needed, each.moment))


def peaks(memory: ModelMemory, ranks: Iterable[int]) -> list[Fullest]:
    """The moment in which each of the ranks holds most."""
    moments = memory.moments().items()
    each = ([Fullest(rank, moment, rows(rank), memory.margin(rank)) for moment, rows in moments] for rank in ranks)
    return [max(found, key=lambda one: one.needed) for found in each]


# ------------------------------------------------------------------------------------------------ reports


def _role_report(model: PlacedModel) -> Report:
    spec, layout = model.spec, model.layout
    return {
        "role": model.name,
        "model": str(spec.path),
        "parameters": num_parameters(spec.base, spec.head),
        "trained_parameters": num_trained(spec, model.head) if spec.lora is not None else None,
        "dtype": model.config.dtype,
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "cp", "ep", "dp")},
        "sequence_parallel": model.config.sequence_parallel,
        "ranks": shown(layout.ranks),
        "layers_per_stage": [len(layers) for layers in layout.stages(spec.num_layers)],
        "groups_of_first_rank": layout.groups_of_first_rank(),
    }


def _rollout_report(rollout: RolloutLayout, stages: Stages) -> Report:
    return {
        **{name: getattr(rollout, name) for name in ("tp", "pp", "expert_parallel")},
        "replicas": len(rollout.replicas),
        "ranks": shown(rollout.ranks),
        "first_replica": list(rollout.replicas[0]),
        "layers_per_stage": [len(layers) for layers in stages],
    }


def _memory_report(rows_of: Callable[[int], dict[str, Footprint]], world_size: int) -> Report:
    """The rank with most for each role, and over all that lies on a rank; the first of those alike."""
    rows = {rank: rows_of(rank) for rank in range(world_size)}
    names = dict.fromkeys(name for found in rows.values() for name in found)
    most = {
        name: max((rank for rank in rows if name in rows[rank]), key=lambda rank: rows[rank][name].total)
        for name in names
    }
    sums = {rank: together(list(found.values())) for rank, found in rows.items()}
    worst = max(sums, key=lambda rank: sums[rank].total)
    return {
        "roles": {name: _footprint_report(rank, rows[rank][name]) for name, rank in most.items()},
        "worst_rank": _footprint_report(worst, sums[worst]) | {"roles": list(rows[worst])},
    }


def _footprint_report(rank: int, footprint: Footprint) -> Report:
    return {"rank": rank, **vars(footprint), "total": footprint.total}


def _reshard_report(of: RunMemory) -> Report:
    plan, size = of.plan, of.itemsize
    training, engine = plan.train.ranks, plan.rollout.ranks
    reshard, model_bytes = of.reshard, size * model_elements(of.actor.spec, "lm")
    memory = reshard.memory
    return {
        "colocated": training == engine,
        "model_bytes": model_bytes,
        "ways": {way.value: {"parameters": number, "bytes": sizes} for way, (number, sizes) in reshard.ways.items()},
        "received_bytes": spread(size * plan.received_elements(rank) for rank in engine),
        "lower_bound_bytes": spread(size * plan.lower_bound(rank) for rank in engine),
        "sent_bytes": spread(size * plan.sent_elements(rank) for rank in training),
        "permuted_bytes": spread(size * plan.permuted_elements(rank) for rank in engine),
        "peak_extra_bytes": spread(memory[rank].peak_extra for rank in reshard.ranks),
        "frozen": _frozen_report(of),
        "num_buckets": len(plan.buckets),
        **formulas(model_bytes, plan.train, plan.rollout),
    }


def _frozen_report(of: RunMemory) -> Report | None:
    """Of a model with adapters: what a rank receives of frozen weights and of adapters, and whether the first once."""
    if of.actor.spec.lora is None:
        return None
    ranks, dtype = of.rollout.ranks, of.actor.config.dtype
    adapters = plan_reshard(of.actor.spec, of.actor.layout, of.rollout, dtype=dtype, changing=True)
    later = [of.itemsize * adapters.received_elements(rank) for rank in ranks]
    first = [of.itemsize * of.plan.received_elements(rank) for rank in ranks]
    frozen = max(all_of_it - own for all_of_it, own in zip(first, later, strict=True))
    return {"received_bytes": frozen, "adapter_bytes": max(later), "once": of.run.keeps_base}
