"""A config on so many ranks: every model's spec read once, every layout, and all reasons why it cannot run.

    run = place(config, world_size)    what `hybridflow.train`, `hybridflow.plan` and the roles are built on

Reads the config.json of each model, no weights, and needs no process group. Memory is not looked at, the engine's KV
cache apart, which must hold one sequence.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from hybridflow.architecture.sharing import check_expert_shares, check_experts, check_parallel
from hybridflow.architecture.spec import HEADS, Head, ModelSpec, read_spec
from hybridflow.config import (
    ExperimentConfig,
    RewardModelConfig,
    RoleConfig,
    RunConfig,
    TrainedRoleConfig,
)
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import CheckpointError, ConfigError, Reasons, remedy
from hybridflow.formats.block_fp8 import READ_AS_BFLOAT16
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.layout import Layout, RolloutLayout, Stages
from hybridflow.placement.adapters import read_lora
from hybridflow.placement.context_parallel import check_context
from hybridflow.placement.kv_cache import KVCacheSize, size_kv_cache
from hybridflow.placement.pipeline import check_layers
from hybridflow.placement.recomputation import check_recompute
from hybridflow.recording.trackers import check_trackers
from hybridflow.reshard.groups import check_engine_stages, engine_stages, rollout_layout, standalone_layout

HEAD_CLASSES = {head: f"*{suffix}" for suffix, head in HEADS.items()}


@dataclass(frozen=True)
class PlacedModel:
    """A role's model on a grid."""

    name: str  # the config key: "actor", "reward.models.0"
    config: RoleConfig
    spec: ModelSpec
    layout: Layout
    head: Head  # the one that the role runs it with, whichever the directory has


@dataclass(frozen=True)
class PlacedModels:
    """All models of a config. Made by `place`."""

    config: AnyConfig
    world_size: int
    models: dict[str, PlacedModel]  # by name
    cuda: bool  # whether they are on GPUs
    rollout: RolloutLayout | None  # of the engine, where there is one

    @property
    def trained(self) -> PlacedModel:
        return self.models[self.config.trained_name]

    @property
    def computing(self) -> dict[str, PlacedModel]:
        """All that compute, by name: beside the models the actor as a reference that has no weights of its own."""
        if not self.config.reference_is_base:
            return self.models
        actor = self.models["actor"]
        return self.models | {"reference": replace(actor, name="reference", spec=actor.spec.base)}

    @property
    def begins_with_adapters(self) -> bool:
        """Whether the actor's adapters are those of a directory: a reference that is the actor then has them too."""
        lora = self.models["actor"].spec.lora
        return lora is not None and lora.path is not None

    @property
    def bucket_bytes(self) -> int:
        """Of the buckets in which the actor's weights, or those of the trained model, live and travel."""
        return self.config.bucket_bytes(cuda=self.cuda)

    @property
    def critic_shares_base(self) -> bool:
        """Whether the critic's frozen weights are the actor's: of one directory and dtype, and cut alike."""
        critic, actor = self.models.get("critic"), self.trained
        if critic is None or critic.spec.lora is None or actor.spec.lora is None:
            return False
        return (critic.spec.path, critic.config.dtype, critic.layout) == (
            actor.spec.path,
            actor.config.dtype,
            actor.layout,
        )


@dataclass(frozen=True)
class PlacedRun(PlacedModels):
    """All models of a config, and the engine. Made by `place`."""

    config: ExperimentConfig
    rollout: RolloutLayout
    stages: Stages  # the layers of each engine stage
    kv_cache: KVCacheSize

    @property
    def keeps_base(self) -> bool:
        """Whether the engine keeps what it has of weights that are frozen: on ranks that hold no model there is room.

        Elsewhere what the engine has beside the trainer's weights is there while it generates.
        """
        others = {rank for model in self.models.values() for rank in model.layout.ranks}
        return self.actor.spec.lora is not None and others.isdisjoint(self.rollout.ranks)

    @property
    def captures_graphs(self) -> bool:
        """Whether the engine replays CUDA graphs, which keep the addresses of the weights."""
        return self.cuda and not self.config.rollout.enforce_eager

    def sequences_of_step(self, cache: KVCacheSize) -> int:
        """Of the engine, at most, with this cache."""
        config = self.config
        expected = config.data.max_prompt_length + config.sampling.mean_response_length
        rows = config.rows_of_replica(len(self.rollout.replicas))
        return config.rollout.sequences_of_step(rows, cache.sequences(expected), cuda=self.cuda)

    @property
    def actor(self) -> PlacedModel:
        return self.models["actor"]

    @property
    def routing(self) -> RoutingSizes | None:
        """Of the engine's choice of experts, where the actor replays it."""
        spec = self.actor.spec
        sizes = RoutingSizes(spec.num_layers, spec.experts_per_token, spec.num_experts)
        return sizes if self.config.algorithm.policy.replay_routing else None

    @property
    def reward_models(self) -> list[PlacedModel]:
        """In the order of the config."""
        return [model for name, model in self.models.items() if name.startswith("reward.models.")]


@overload
def place(config: ExperimentConfig, world_size: int, *, cuda: bool | None = None) -> PlacedRun: ...


@overload
def place(config: AnyConfig, world_size: int, *, cuda: bool | None = None) -> PlacedModels: ...


def place(config: AnyConfig, world_size: int, *, cuda: bool | None = None) -> PlacedModels:
    """The run on `world_size` ranks. Errors: ConfigError with a line for each reason why there is none.

    cuda: whether it runs on GPUs; None: as the config says, by default whether this machine has any.
    """
    reasons, has_cuda = Reasons(), uses_cuda(config.platform) if cuda is None else cuda
    layouts = config.layouts(world_size, reasons)
    reasons.collect(check_trackers, config.metrics)
    reasons.collect(config.check_traced_ranks, world_size)
    train = layouts.get("actor") if not reasons.lines else None
    specs, engine = check_models(config, reasons), None
    for name, spec in specs.items():
        _check_cuts(name, config.roles()[name], spec, reasons, cuda=has_cuda)
    if isinstance(config, ExperimentConfig) and "actor" in specs:
        engine = _engine(config, specs["actor"], train, world_size, reasons, cuda=has_cuda)
    reasons.refuse()
    models = {name: _placed(name, role, specs[name], layouts[name]) for name, role in config.roles().items()}
    if not isinstance(config, ExperimentConfig):
        return PlacedModels(config, world_size, models, has_cuda, rollout=None)
    assert engine is not None, "no reason, and no engine"
    return PlacedRun(config, world_size, models, has_cuda, *engine)


def reencodes(config: RunConfig, name: str) -> bool:
    """Whether a reward model reads texts that are encoded anew, in place of the actor's tokens."""
    role = config.roles().get(name)  # a reference that is the actor has no section
    return isinstance(role, RewardModelConfig) and role.reencode


def left_out(config: RunConfig) -> list[str]:
    """What is in the models' directories and is not loaded, or not as it is there, a line each.

    Errors: CheckpointError as `read_spec`.
    """
    specs = {name: read_spec(role.model) for name, role in config.roles().items()}
    narrow = [f"{name}.model: {READ_AS_BFLOAT16}" for name, spec in specs.items() if spec.block_fp8]
    images = [
        f"{name}.model: what reads images is left out: the language model alone is trained, and exported as a model "
        "of its own"
        for name, spec in specs.items()
        if spec.wrapped
    ]
    return [*narrow, *images] + [
        f"{name}.model: the last {spec.num_prediction_layers} layers ({spec.traits.prediction.key}) "
        f"are left out: they guess further tokens, and are neither trained nor exported"
        for name, spec in specs.items()
        if spec.num_prediction_layers
    ]


def _specs(config: RunConfig, reasons: Reasons) -> dict[str, ModelSpec]:
    """By role, those that can be read. Roles may share a directory, which is then read once."""
    roles = config.roles()
    read = {path: reasons.collect(read_spec, path) for path in dict.fromkeys(role.model for role in roles.values())}
    specs = {name: spec for name, role in roles.items() if (spec := read[role.model]) is not None}
    found = {name: reasons.collect(of_role, config, name, spec) for name, spec in specs.items()}
    return {name: specs[name] if spec is None else spec for name, spec in found.items()}


def of_role(config: RunConfig, name: str, spec: ModelSpec) -> ModelSpec:
    """With the overrides and the adapters that the role has. Errors: ConfigError, naming the key."""
    role, overrides = config.roles()[name], config.hf_overrides(name)
    if overrides:
        try:
            spec = read_spec(spec.path, overrides=overrides)
        except CheckpointError as error:
            raise ConfigError(f"{config.overriding_role(name)}.hf_overrides: {error}") from error
    if not isinstance(role, TrainedRoleConfig) or role.lora is None:
        return spec
    return replace(spec, lora=read_lora(f"{name}.lora", role.lora, spec, config.seed))


def _placed(name: str, config: RoleConfig, spec: ModelSpec, layout: Layout) -> PlacedModel:
    return PlacedModel(name, config, spec, layout, head_of(name))


def head_of(name: str) -> Head:
    return "lm" if name in ("actor", "reference") else "score"


# ------------------------------------------------------------------------------------------------ models


def check_models(config: AnyConfig, reasons: Reasons) -> dict[str, ModelSpec]:
    """By role, those that can be read. What no layout mends is noted: heads, lengths, vocabularies, routing."""
    specs = _specs(config, reasons)
    for name, spec in specs.items():
        reasons.collect(_check_head, name, spec)
        overriding = config.overriding_role(name)
        length = config.max_sequence_length, config.length_keys, overriding, config.shortened
        reasons.collect(spec.check_length, *length)
        if "actor" in specs and not reencodes(config, name):
            reasons.collect(spec.check_vocabulary, name, specs["actor"])
    if config.algorithm.kl.resets and {"actor", "reference"} <= specs.keys():
        reasons.collect(_check_alike, specs["actor"], specs["reference"])
    if isinstance(config, ExperimentConfig) and "actor" in specs:
        reasons.collect(_check_routing, config, specs["actor"])
    return specs


def _check_cuts(name: str, config: RoleConfig, spec: ModelSpec, reasons: Reasons, *, cuda: bool) -> None:
    """Whether the model can be cut as its role says, on however many ranks."""
    reasons.collect(check_parallel, spec, f"{name}.tensor_parallel_size", config.tensor_parallel_size)
    reasons.collect(check_experts, spec, f"{name}.expert_parallel_size", config.expert_parallel_size)
    etp, key = config.expert_tensor_parallel_size, f"{name}.expert_tensor_parallel_size"
    setting, times = key, 1
    if etp is None:
        setting, times = f"{name}.tensor_parallel_size", config.expert_parallel_size
        key = setting + (" / expert_parallel_size" if times > 1 else "")
    elif not spec.num_experts:
        reasons.lines.append(f"{key} = {etp}: {spec.path} has no experts{remedy({key: [None]})}")
    reasons.collect(check_expert_shares, spec, key, config.expert_tp, setting=setting, times=times)
    reasons.collect(check_layers, name, config, spec)
    reasons.collect(check_context, name, config, spec, cuda=cuda)
    if isinstance(config, TrainedRoleConfig):
        reasons.collect(check_recompute, f"{name}.recompute", config.recompute, spec)


def _check_alike(actor: ModelSpec, reference: ModelSpec) -> None:
    """A reference that becomes the actor has the actor's architecture."""
    if replace(reference, path=actor.path) != actor.base or reference.rope != actor.rope:
        raise ConfigError(
            f"algorithm.kl.reset_reference_interval: reference.model = {reference.path} must have the sizes of "
            f"actor.model = {actor.path}, whose weights it takes{remedy({'reference.model': [actor.path]})}"
        )


def _check_head(name: str, spec: ModelSpec) -> None:
    """What is trained to score may start from either; what is only read needs a head, and so does the actor."""
    head = head_of(name)
    if name not in ("critic", "reward_model") and spec.head != head:
        trained = " with a trained score.weight" if head == "score" else ""
        raise ConfigError(
            f"{name}.model = {spec.path} must be a {HEAD_CLASSES[head]}{trained}, it is a {HEAD_CLASSES[spec.head]}"
        )


# ------------------------------------------------------------------------------------------------ the engine


def _engine(
    config: ExperimentConfig, actor: ModelSpec, train: Layout | None, world_size: int, reasons: Reasons, *, cuda: bool
) -> tuple[RolloutLayout, Stages, KVCacheSize] | None:
    """The ranks that generate together, the layers of each engine stage, and the KV cache. What is wrong is noted.

    train: of the actor; None where a layout is wrong.
    """
    _check_engine(config, actor, reasons)
    placed = None if train is None else reasons.collect(_place_engine, config, actor, train, world_size)
    kv_cache = None if placed is None else reasons.collect(size_kv_cache, config, actor, *placed, cuda=cuda)
    return None if placed is None or kv_cache is None else (*placed, kv_cache)


def _check_engine(config: ExperimentConfig, actor: ModelSpec, reasons: Reasons) -> None:
    """Whether the engine can cut the actor's model; with the actor's own size that is said of the actor."""
    if config.rollout.tensor_parallel_size is not None:
        key = "rollout.tensor_parallel_size"
        reasons.collect(check_parallel, actor, key, config.rollout.tensor_parallel_size)
    tp = config.rollout_tensor_parallel_size
    if config.rollout_expert_parallel:
        key = "rollout.tensor_parallel_size"
        told = f"{key} with rollout.enable_expert_parallel"
        if actor.num_experts or tp == 1:
            reasons.collect(check_experts, actor, told, tp, key)
        elif config.rollout.enable_expert_parallel:  # by default as the actor, of which it is said
            more = remedy({"rollout.enable_expert_parallel": [False]})
            reasons.lines.append(f"{told} = {tp}: {actor.path} has no experts{more}")
    else:
        reasons.collect(check_expert_shares, actor, "rollout.tensor_parallel_size", tp)
    reasons.collect(check_engine_stages, actor.num_layers, config.rollout.pipeline_parallel_size)


def _check_routing(config: ExperimentConfig, actor: ModelSpec) -> None:
    if config.algorithm.policy.replay_routing and actor.experts_per_token < 2:
        found = f"num_experts_per_tok = {actor.experts_per_token}" if actor.num_experts else "no experts"
        raise ConfigError(
            f"algorithm.policy.replay_routing = true needs a mixture of experts that chooses at least 2 for a token: "
            f"actor.model = {actor.path} has {found}{remedy({'algorithm.policy.replay_routing': [False]})}"
        )


def _place_engine(
    config: ExperimentConfig, actor: ModelSpec, train: Layout, world_size: int
) -> tuple[RolloutLayout, Stages]:
    """Which ranks generate together, and the layers of each engine stage."""
    check_layers("actor", config.actor, actor)  # the engine is cut where training is
    tp, pp = config.rollout_tensor_parallel_size, config.rollout.pipeline_parallel_size
    ranks = config.rollout_ranks(world_size)
    whole = config.rollout_expert_parallel
    layout = (
        rollout_layout(train, tp, pp, expert_parallel=whole)
        if ranks == train.ranks
        else standalone_layout(ranks, tp, pp, expert_parallel=whole)
    )
    return layout, engine_stages(actor.num_layers, train, layout)


# ------------------------------------------------------------------------------------------------ the output directory


def check_output_dir(config: RunConfig) -> None:
    """Raise ConfigError unless a run directory can be made and written to; nothing of the attempt is left behind.

    For one rank to call: the first, which writes the run directory.
    """
    directory = Path(config.output_dir)
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise ConfigError(
            f"name = {config.name}: {config.run_dir} is a file: the run's directory has this path (output_dir/name)"
        )
    try:
        with _made(directory), tempfile.TemporaryDirectory(prefix=f".{config.name}.", dir=directory) as attempt:
            (Path(attempt) / "file").write_bytes(b"0")
    except OSError as error:
        above = error.filename is not None and not Path(error.filename).is_relative_to(directory)
        path = error.filename if above else directory
        raise ConfigError(f"output_dir = {config.output_dir}: cannot write to {path}: {error.strerror}") from error


@contextlib.contextmanager
def _made(directory: Path) -> Iterator[None]:
    """`directory` is there within the block; after it those parts of the path that were missing are gone again."""
    made: list[Path] = []
    try:
        for path in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
            path.mkdir()
            made.append(path)
        yield
    finally:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # another run has put something there by now
                path.rmdir()
