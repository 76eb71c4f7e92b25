"""What every config has, whatever the run learns from."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hybridflow.config.best_metric import lower_is_better
from hybridflow.config.files import read_tree
from hybridflow.config.messages import explanation
from hybridflow.config.metrics import MetricsConfig, StopConfig
from hybridflow.config.old_keys import with_new_names
from hybridflow.config.roles import RoleConfig, TrainedRoleConfig, replace_role
from hybridflow.config.section import MOST_BYTES, PathText, Section, check_length
from hybridflow.config.vendor_arguments import vendor_lines
from hybridflow.errors import ConfigError, Mendable, Reasons, remedy
from hybridflow.parallel.layout import Layout, PlatformName


class NonFiniteConfig(Section):
    """What happens where a score, a log-prob, a value, a loss or a gradient is NaN or infinite: no step is taken of it,
    the batch is written to batches/, and the run stops or goes on without."""

    action: Literal["stop", "skip"] = "stop"
    """stop ends the run. skip leaves out the optimizer step and continues."""
    max_in_a_row: PositiveInt = 3
    """With action skip: iterations in a row that may lose a step before the run ends."""


class CheckpointConfig(Section):
    """What a run saves so that it can go on, and when it ends early."""

    save_interval: NonNegativeInt = 0
    """Iterations between checkpoints. 0: no checkpoints by iterations."""
    save_minutes: PositiveFloat | None = 30.0
    """Minutes between checkpoints, beside save_interval. null: no checkpoints by time."""
    keep_last: PositiveInt = 2
    """The number of latest checkpoints that stay on disk."""
    keep_every: PositiveInt | None = None
    """Checkpoints of iterations that this number divides stay on disk. null: none stay for this reason."""
    keep_best: NonNegativeInt = 0
    """The number of checkpoints with the best best_metric that stay on disk. 0: none stay for this reason."""
    best_metric: str = "reward/score_mean"
    """The metric that keep_best compares."""
    best_is: Literal["auto", "highest", "lowest"] = "auto"
    """Whether the highest or the lowest value is the best. auto: lowest for losses, KLs, errors and seconds."""
    async_save: bool = False
    """Whether training continues while the checkpoint is written from a copy in host memory."""
    load: PathText = "auto"
    """auto resumes from the latest checkpoint of the run directory. none starts anew. A path forks another run."""
    save_rollout: bool = False
    """Whether the responses of an iteration are saved until the iteration is over. A resume uses them
    again."""
    on_error: Literal["stop", "continue"] = "stop"
    """What happens when a checkpoint cannot be written: the run stops or continues."""
    grace_seconds: PositiveFloat = 300.0
    """Seconds from a signal to the end of the run."""
    max_hours: PositiveFloat | None = None
    """Hours after the start within which the run saves and ends. null: no limit."""
    max_restarts_without_progress: PositiveInt = 3
    """Restarts by torchrun that may begin at the same iteration before the run ends."""

    @property
    def saves(self) -> bool:
        """Whether a run saves before a request to stop."""
        return bool(self.save_interval) or self.save_minutes is not None

    @property
    def keeps(self) -> Literal["highest", "lowest"]:
        """Which values of best_metric are the best."""
        if self.best_is != "auto":
            return self.best_is
        return "lowest" if lower_is_better(self.best_metric) else "highest"


class WatchdogConfig(Section):
    """Seconds that a rank may be in a phase of the run; then all ranks end, with a report on who is stuck."""

    start_seconds: PositiveFloat = 3600.0
    """Seconds for the start: models and engine are built, a checkpoint is loaded."""
    rollout_seconds: PositiveFloat = 7200.0
    """Seconds for the generation of one iteration's responses."""
    estimate_seconds: PositiveFloat = 3600.0
    """Seconds for the scores, log-probs and values of one iteration."""
    update_seconds: PositiveFloat = 7200.0
    """Seconds for the optimizer steps of one iteration."""
    evaluate_seconds: PositiveFloat = 7200.0
    """Seconds for one evaluation on data.heldout."""
    save_seconds: PositiveFloat = 3600.0
    """Seconds for one checkpoint."""

    def deadlines(self) -> dict[str, float]:
        """Seconds by phase."""
        return {name.removesuffix("_seconds"): seconds for name, seconds in self}


MOST_OF_NAME = MOST_BYTES - len(".-rollout.lock.12345678")  # beside the run's directory lie files of longer names
ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "HF_")

Environment = dict[
    Annotated[str, Field(pattern=rf"^({'|'.join(ENVIRONMENT_PREFIXES)})[A-Za-z0-9_]+$")], str | int | float
]


def _environment(given: Any) -> Any:
    """Variables by name. Errors: ValueError for those that are not for a config, and for what is no text or number."""
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if not re.fullmatch(rf"({'|'.join(ENVIRONMENT_PREFIXES)})[A-Za-z0-9_]+", str(name)):
            raise ValueError(
                f"{name!r}: names begin with {', '.join(ENVIRONMENT_PREFIXES)}; launch/run.py has --env for others"
            )
        if isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value):
            raise ValueError(f"{name} = {value!r}: a value is a text or a number, such as 1 or '0'")
    return {name: str(value) for name, value in given.items()}


def _small(seed: int) -> int:
    """The seed. Errors: PydanticCustomError where torch's generators, to which megatron gives more, take it not."""
    if seed >= 2**63:
        raise PydanticCustomError("large_seed", "a seed is below 2**63")
    return seed


class RunConfig(Section):
    """What every run has, whatever it learns from: from what the engine generates, or from fixed data."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$"), AfterValidator(lambda name: check_length(name, MOST_OF_NAME))]
    """The name of the run. The run's files lie in the directory of this name below output_dir."""
    seed: Annotated[NonNegativeInt, AfterValidator(_small)] = 0
    """The seed of all random numbers. The same seed gives the same run."""
    platform: PlatformName = "auto"
    """The device of the ranks. auto: the CPU where torch is built without CUDA, otherwise CUDA."""
    output_dir: PathText = "runs"
    """The directory that holds the run directories."""
    env_vars: Annotated[dict[str, str], BeforeValidator(_environment, json_schema_input_type=Environment)] = {}
    """Environment variables of the ranks: NCCL_*, GLOO_* and HF_*. A variable that is already set stays as it is."""
    device_profile: str | None = None
    """The device that `auto` plans for: the name of a shipped profile or a file. null: the device's own name."""
    expandable_segments: bool = False
    """Whether torch's allocator takes the GPU memory of training in segments that grow. Not seen on GPUs so far."""
    tensor_parallel_across_hosts: bool = False
    """Whether a tensor-parallel group may cross hosts. false: each group lies on one host."""
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    """What happens when a score, a log-prob, a value, a loss or a gradient is NaN or infinite."""
    stop_when: StopConfig | None = None
    """A metric whose value ends the run early. null: the run does all iterations."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What the run saves, where the run resumes, and when the run ends early."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Time limits of the phases. A rank beyond the limit of a phase ends the run with a report."""
    metrics: MetricsConfig = MetricsConfig()
    """Where metrics go, and how the model is evaluated."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should change in the file that this was read from."""
        return self._notes

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        stop = self.stop_when
        if stop is not None and stop.metric.startswith("eval/") and not self.metrics.eval_interval:
            why = f"stop_when.metric = {stop.metric} needs metrics.eval_interval, which is 0"
            raise Mendable(why, {"metrics.eval_interval": [1], "stop_when": [None]})
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    def roles(self) -> dict[str, RoleConfig]:
        """Every model of the run by the config key that names it."""
        raise NotImplementedError

    def shortened(self, most: int) -> dict[str, list[Any]]:
        """Settings, as of `remedy`, with which the longest sequence has `most` tokens."""
        raise NotImplementedError

    @property
    def trained_name(self) -> str:
        """The config key of the model that is trained, and that generates; a critic may be trained beside the model."""
        return "actor" if "actor" in self.roles() else "reward_model"

    @property
    def trained(self) -> TrainedRoleConfig:
        """The model of this name."""
        found = self.roles()[self.trained_name]
        assert isinstance(found, TrainedRoleConfig), f"{self.trained_name} has no optimizer"
        return found

    def hf_overrides(self, name: str) -> dict[str, Any]:
        """Of a role's model."""
        given = self.roles()[self.overriding_role(name)].hf_overrides
        return {} if given is None else given.given()

    def overriding_role(self, name: str) -> str:
        """Whose `hf_overrides` a role's model has: without the key, a model that is the trained one has the trained
        one's."""
        role = self.roles()[name]
        inherits = role.hf_overrides is None and role.model == self.trained.model
        return self.trained_name if inherits else name

    @property
    def reference_is_base(self) -> bool:
        """Whether the section `reference` is left out, as the actor without adapters, or with those it began with."""
        raise NotImplementedError

    def layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Each role's layout on `world_size` ranks. What is wrong is noted; a role that has none is left out."""
        raise NotImplementedError

    def check_world_size(self, world_size: int) -> None:
        """Raise ConfigError, with all reasons, unless the models, and the engine if there is one, can be placed."""
        reasons = Reasons()
        self.layouts(world_size, reasons)
        reasons.collect(self.check_traced_ranks, world_size)
        reasons.refuse()

    def check_traced_ranks(self, world_size: int) -> None:
        """Errors: ConfigError where a trace is asked of a rank that is not there."""
        ranks = self.metrics.profile.ranks if self.metrics.profile is not None else (0,)
        if max(ranks) >= world_size:
            there = [rank for rank in ranks if rank < world_size] or [0]
            raise ConfigError(
                f"metrics.profile.ranks has {max(ranks)}: the run has the ranks 0 to {world_size - 1}"
                f"{remedy({'metrics.profile.ranks': [there]})}"
            )

    def check_own_directory(self) -> None:
        """Errors: ConfigError for a model in the run's own directory, which a start moves away and the end replaces."""
        named = {f"{name}.model": role.model for name, role in self.roles().items()}
        for name, role in self.roles().items():
            if isinstance(role, TrainedRoleConfig) and role.lora is not None and role.lora.adapter_path is not None:
                named[f"{name}.lora.adapter_path"] = role.lora.adapter_path
        own = self.run_dir.resolve()
        within = [f"{key} = {path}" for key, path in named.items() if Path(path).resolve().is_relative_to(own)]
        if within:
            raise ConfigError(
                f"{', '.join(within)}: lies in the directory of this run, {self.run_dir}, which a new start moves away "
                f"and the end of the run replaces. Give the run another name, such as name={self.name}_2"
            )

    def vendor_lines(self) -> list[str]:
        """What the run hands on to megatron-core, and to vLLM where there is an engine; a line a key."""
        return vendor_lines({f"{name}.megatron_arguments": x.megatron_arguments for name, x in self.roles().items()})

    def check_sections(self, needed: Collection[str], askers: Mapping[str, str]) -> None:
        """Errors: ValueError unless needed sections are there, and no others. askers: by section, what may need it."""
        for name, asker in askers.items():
            given = getattr(self, name) is not None
            if name in needed and not given and not (name == "reference" and self.reference_is_base):
                raise ValueError(f"{name}: is required by {asker}: add the section {name}")
            if given and name not in needed:
                raise ValueError(f"{name}: {asker} has none: remove the section {name}, or set {name}=null")

    def check_budgets(self, longest: int, keys: str) -> None:
        """Let micro-batches of no given size hold the longest sequence; keys: those that make it so long.

        Errors: ValueError for a given size below the longest sequence."""
        small: dict[str, int] = {}
        for name, role in self.roles().items():
            if role.micro_batch_tokens >= longest:
                continue
            if "micro_batch_tokens" not in role.model_fields_set:
                replace_role(self, name, role.model_copy(update={"micro_batch_tokens": longest}))
            else:
                small[f"{name}.micro_batch_tokens"] = role.micro_batch_tokens
        if small:
            better = " ".join(f"{key}={longest}" for key in small)
            raise ValueError(
                f"{', '.join(f'{key} = {tokens}' for key, tokens in small.items())} cannot hold one sequence: "
                f"{keys} = {longest}. Write {better} or more"
            )

    def role_layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Role -> layout, for roles with a layout: each grid fills the role's ranks."""
        found = {name: reasons.collect(role.layout, name, world_size) for name, role in self.roles().items()}
        return {name: layout for name, layout in found.items() if layout is not None}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Self:
        """Read `path`, apply `section.key=value` overrides (values are YAML), validate.

        Errors: ConfigError naming the file, the key, the value and the rule.
        """
        return cls.from_tree(read_tree(path, overrides), path)

    @classmethod
    def from_tree(cls, tree: dict[str, Any], source: str | Path) -> Self:
        """Validate what a file or a program says; `source` is where, for messages. Errors: ConfigError."""
        tree, notes = with_new_names(tree, source)
        try:
            found = cls.model_validate(tree)
            found._notes = notes
            return found
        except ValidationError as error:
            raise ConfigError(explanation(error, cls, source)) from error
