"""What a config means on so many ranks, before any process starts: grids, memory per GPU, and the reshard. Pure.

    forecast(config, 64)    everything `hybridflow.plan` prints, as plain lists and dicts for JSON; bytes throughout

Reads the config.json of each model and no weights. Everything that can be wrong with a layout is found here, for all
roles at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import num_parameters
from hybridflow.config import ExperimentConfig, RoleConfig, TrainedRoleConfig
from hybridflow.errors import ConfigError, UserError
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages
from hybridflow.placement import shown
from hybridflow.planning.footprint import (
    ITEM_BYTES,
    Footprint,
    engine_activation_bytes,
    forward_activation_bytes,
    gradient_bytes,
    kv_cache_bytes,
    model_elements,
    optimizer_bytes,
    stage_elements,
    together,
    training_activation_bytes,
)
from hybridflow.planning.hand_off import HandOffs
from hybridflow.reshard.groups import check_rollout, rollout_of
from hybridflow.reshard.plan import plan_reshard

Report = dict[str, Any]


def forecast(config: ExperimentConfig, world_size: int) -> Report:
    """Roles, rollout, memory and reshard of a run. Errors: ConfigError with all reasons, a line each."""
    run = PlacedRun(config, world_size)
    return {
        "name": config.name,
        "world_size": world_size,
        "roles": [model.report() for model in run.models.values()],
        "rollout": _rollout_report(run.rollout, run.stages),
        "memory": {moment: _memory_report(rows, world_size) for moment, rows in run.moments().items()},
        "reshard": _reshard_report(run),
    }


# ------------------------------------------------------------------------------------------------ roles


@dataclass(frozen=True)
class PlacedModel:
    """A role of the run on its grid."""

    name: str
    config: RoleConfig
    spec: ModelSpec
    layout: Layout
    max_length: int  # tokens of the longest sequence
    rows: int  # most sequences of a replica that are computed together: a mini-batch, or a batch where none is trained

    @property
    def head(self) -> str:
        return "lm" if self.name in ("actor", "reference") else "score"

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.config.dtype]

    @cached_property
    def training(self) -> tuple[Footprint, ...]:
        """Of each pipeline stage, while models train."""
        elements = stage_elements(self.spec, self.head, self.layout)
        return tuple(self._training(stage, count) for stage, count in enumerate(elements))

    def _training(self, stage: int, elements: int) -> Footprint:
        weights = self.itemsize * elements
        replica_tokens = self.rows * self.max_length
        sizes = {
            "head": self.head,
            "itemsize": self.itemsize,
            "sequence_parallel": self.config.sequence_parallel,
            "tokens": min(self.config.micro_batch_tokens, replica_tokens),
        }
        if not isinstance(self.config, TrainedRoleConfig):
            return Footprint(weights, activations=forward_activation_bytes(self.spec, self.layout, stage, **sizes))
        return Footprint(
            weights=weights,
            gradients=gradient_bytes(elements),
            optimizer=optimizer_bytes(elements, self.config.optimizer, dtype=self.config.dtype, dp=self.layout.dp),
            activations=training_activation_bytes(
                self.spec,
                self.layout,
                stage,
                recompute=self.config.recompute,
                replica_tokens=replica_tokens,
                **sizes,
            ),
        )

    def at_rest(self, stage: int) -> Footprint:
        """While the engine generates: without activations and what is offloaded."""
        held = self.training[stage]
        if not isinstance(self.config, TrainedRoleConfig):
            return Footprint(held.weights)
        return Footprint(
            weights=held.weights,
            gradients=0 if self.config.offload_gradients else held.gradients,
            optimizer=0 if self.config.offload_optimizer else held.optimizer,
        )

    def report(self) -> Report:
        layout = self.layout
        first = {axis: list(layout.groups(axis)[0]) for axis in ("tp", "pp", "dp")}
        return {
            "role": self.name,
            "model": str(self.spec.path),
            "parameters": num_parameters(self.spec, self.spec.head),
            "dtype": self.config.dtype,
            **{axis: getattr(layout, axis) for axis in ("tp", "pp", "vpp", "dp")},
            "sequence_parallel": self.config.sequence_parallel,
            "ranks": shown(layout.ranks),
            "layers_per_stage": [len(layers) for layers in layout.stages(self.spec.num_layers)],
            "groups_of_first_rank": first,
        }


class PlacedRun:
    """All models of a config and its engine on `world_size` ranks. Errors: as `forecast`."""

    def __init__(self, config: ExperimentConfig, world_size: int) -> None:
        config.check_world_size(world_size)
        self.config, self.world_size = config, world_size
        self.models = placed_models(config, world_size)
        self.actor = self.models["actor"]
        self.rollout, self.stages = rollout_of(config, self.actor.spec.num_layers, world_size)
        bucket_elements = config.rollout.bucket_bytes(cuda=True) // self.actor.itemsize
        self.plan = plan_reshard(self.actor.spec, self.actor.layout, self.rollout, bucket_elements=bucket_elements)
        optimizer = config.actor.optimizer
        self.hand_offs = HandOffs(
            self.plan,
            self.actor.spec,
            itemsize=self.actor.itemsize,
            # without ZeRO-1 each weight has a storage of its own
            bucket_elements=bucket_elements if optimizer.zero1 and optimizer.name == "adam" else 0,
        )

    def moments(self) -> dict[str, Callable[[int], dict[str, Footprint]]]:
        """What lies on a rank in each moment, by role."""
        return {"training": self._training, "generation": self._generation}

    def _training(self, rank: int) -> dict[str, Footprint]:
        rows = {name: model.training[model.layout.place(rank).pp] for name, model in self._on(rank)}
        if rank in self.rollout and self.config.rollout.sleep_level == 0:
            rows["engine"] = Footprint(kv_cache=self._kv_cache(rank))
        return rows

    def _generation(self, rank: int) -> dict[str, Footprint]:
        rows = {name: model.at_rest(model.layout.place(rank).pp) for name, model in self._on(rank)}
        memory = self.hand_offs.memory
        if "actor" in rows:
            held = rows["actor"]
            rows["actor"] = Footprint(held.weights - memory[rank].released, held.gradients, held.optimizer)
        if rank in self.rollout:
            rows["engine"] = Footprint(
                weights=memory[rank].own,
                activations=engine_activation_bytes(
                    self.actor.spec,
                    tp=self.rollout.tp,
                    itemsize=self.actor.itemsize,
                    tokens=max(self.config.rollout.max_num_batched_tokens, self.config.max_sequence_length),
                    sequences=self.config.rollout.max_num_seqs,
                ),
                kv_cache=self._kv_cache(rank),
            )
        return rows

    def _on(self, rank: int) -> Iterable[tuple[str, PlacedModel]]:
        return [(name, model) for name, model in self.models.items() if rank in model.layout]

    def _kv_cache(self, rank: int) -> int:
        return kv_cache_bytes(self.config.rollout.kv_cache_gib, self.stages, self.rollout.seat(rank).pp)


def placed_models(config: ExperimentConfig, world_size: int) -> dict[str, PlacedModel]:
    """Every role's model, checked. Errors: ConfigError with a line for each reason."""
    reasons: list[str] = []
    models = {}
    for name, role in config.roles().items():
        try:
            models[name] = _placed_model(name, role, config, world_size)
            reasons += _reasons(models[name], models.get("actor"))
        except UserError as error:
            reasons.append(str(error))
    if "actor" in models:
        reasons += _said(lambda: check_rollout(models["actor"].spec, config.rollout_tensor_parallel_size))
    if reasons:
        raise ConfigError("\n".join(dict.fromkeys(reasons)))  # models may share a directory, and its mistakes
    return models


def _placed_model(name: str, role: RoleConfig, config: ExperimentConfig, world_size: int) -> PlacedModel:
    layout = role.layout(world_size)
    trained = isinstance(role, TrainedRoleConfig)
    batch = config.data.prompts_per_iteration * config.sampling.samples_per_prompt
    return PlacedModel(
        name=name,
        config=role,
        spec=read_spec(role.model),
        layout=layout,
        max_length=config.max_sequence_length,
        rows=ceil((config.algorithm.mini_batch_size if trained else batch) / layout.dp),
    )


def _reasons(model: PlacedModel, actor: PlacedModel | None) -> list[str]:
    """Why this model cannot work where it is placed."""
    spec, name = model.spec, model.name
    return [
        *_said(lambda: spec.check_parallel(f"{name}.tensor_parallel_size", model.layout.tp)),
        *_said(lambda: _check_stages(model)),
        *_said(lambda: spec.check_length(model.max_length)),
        *(_said(lambda: spec.check_vocabulary(name, actor.spec)) if actor else []),
        *_said(lambda: _check_head(model)),
    ]


def _said(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except UserError as error:
        return [str(error)]
    return []


def _check_stages(model: PlacedModel) -> None:
    try:
        model.layout.stages(model.spec.num_layers)
    except ValueError as error:
        keys = [
            key
            for key in (
                "pipeline_parallel_size",
                "virtual_pipeline_parallel_size",
                "num_layers_in_first_pipeline_stage",
                "num_layers_in_last_pipeline_stage",
            )
            if key == "pipeline_parallel_size" or (getattr(model.config, key) or 1) > 1
        ]
        sizes = ", ".join(f"{model.name}.{key} = {getattr(model.config, key)}" for key in keys)
        raise ConfigError(f"{sizes} of {model.spec.path}: {error}") from error


def _check_head(model: PlacedModel) -> None:
    """The critic may start from either; what is only read needs the head that it is read at."""
    if model.name != "critic" and model.spec.head != model.head:
        wanted = {"lm": "a *ForCausalLM", "score": "a *ForSequenceClassification with a trained score.weight"}
        raise ConfigError(f"{model.name}.model = {model.spec.path} must be {wanted[model.head]}, it is of another kind")


# ------------------------------------------------------------------------------------------------ reports


def _rollout_report(rollout: RolloutLayout, stages: Stages) -> Report:
    return {
        "tp": rollout.tp,
        "pp": rollout.pp,
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


def _reshard_report(run: PlacedRun) -> Report:
    plan, size = run.plan, run.actor.itemsize
    training, engine = plan.train.ranks, plan.rollout.ranks
    hand_offs, model_bytes = run.hand_offs, size * model_elements(run.actor.spec, "lm")
    memory = hand_offs.memory
    return {
        "colocated": training == engine,
        "model_bytes": model_bytes,
        "ways": {way.value: {"parameters": number, "bytes": sizes} for way, (number, sizes) in hand_offs.ways.items()},
        "received_bytes": _spread(size * plan.received_elements(rank) for rank in engine),
        "lower_bound_bytes": _spread(size * plan.lower_bound(rank) for rank in engine),
        "sent_bytes": _spread(size * plan.sent_elements(rank) for rank in training),
        "permuted_bytes": _spread(size * plan.permuted_elements(rank) for rank in engine),
        "peak_extra_bytes": _spread(memory[rank].peak_extra for rank in hand_offs.ranks),
        "num_buckets": len(plan.buckets),
        **formulas(model_bytes, plan.train, plan.rollout),
    }


def formulas(model_bytes: int, train: Layout, rollout: RolloutLayout) -> Report:
    """Bytes a rank receives by the papers' formulas, None where their premise does not hold.

    HybridFlow (arXiv 2409.19256, table 2): (tp pp - t_g p_g) / (t_g p_g tp pp) M, where generation groups are within
    the training groups: t_g divides tp, p_g divides pp, on the same ranks. DeepSpeed-Chat (the same table):
    (tp pp dp - 1) / (tp pp dp) M, where training and generation share ranks. Both count a model whose every weight is
    split evenly over all ranks of a group; norms, which are not, and stages of unequal size make a rank differ.
    """
    shards, groups, ranks = train.tp * train.pp, rollout.tp * rollout.pp, len(train.ranks)
    same = train.ranks == rollout.ranks
    within = same and train.tp % rollout.tp == 0 and train.pp % rollout.pp == 0
    return {
        "hybridflow_bytes": (shards - groups) * model_bytes // (groups * shards) if within else None,
        "deepspeed_chat_bytes": (ranks - 1) * model_bytes // ranks if same else None,
    }


def _spread(values: Iterable[int]) -> Report:
    found = list(values)
    return {"min": min(found), "max": max(found), "mean": sum(found) // len(found), "total": sum(found)}
