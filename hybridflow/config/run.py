"""What every run has in its config, whatever it learns from."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from hybridflow.config.best_metric import lower_is_better
from hybridflow.config.files import read_tree
from hybridflow.config.messages import explained
from hybridflow.config.old_keys import renamed
from hybridflow.config.rewards import EvalRewardKey
from hybridflow.config.roles import RoleConfig
from hybridflow.config.section import PathText, Section
from hybridflow.errors import ConfigError, Reasons
from hybridflow.parallel.layout import Layout, PlatformName


class NonFiniteConfig(Section):
    """What happens where a score, a log-prob, a value, a loss or a gradient is NaN or infinite: no step is taken of it,
    the batch is written to batches/, and the run stops or goes on without."""

    action: Literal["stop", "skip"] = "stop"
    max_in_a_row: PositiveInt = 3  # skip: iterations in a row that may lose a step to it


class WandbConfig(Section):
    """Weights & Biases, in the package's extra `wandb`."""

    project: str
    entity: str | None = None  # a user or a team; None: the account's own
    mode: Literal["online", "offline"] = "online"  # offline: into the run directory, for `wandb sync`


class MlflowConfig(Section):
    """MLflow, in the package's extra `mlflow`."""

    experiment: str
    tracking_uri: str  # such as http://tracking:5000


class MetricsConfig(Section):
    csv: bool = True
    tensorboard: bool = True
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    dump_batches: bool = False
    eval_interval: NonNegativeInt = 0  # iterations between evaluations on data.heldout; 0: never
    # package.module:function whose 1.0 counts as right in eval/accuracy, or {function: ..., arguments: {...}}
    eval_reward: EvalRewardKey | None = None
    num_samples: NonNegativeInt = 4  # responses per iteration written to samples.jsonl


class StopConfig(Section):
    """A run ends after the first iteration whose metric is so low or so high, before it has done all iterations."""

    metric: str  # of the run, such as eval/loss; one of eval/ is known every metrics.eval_interval iterations
    at_most: float | None = None  # this or the next one
    at_least: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"at_most = {self.at_most}, at_least = {self.at_least}: give one of the two")
        return self

    def holds(self, value: float) -> bool:
        """Whether a value of the metric is the end; never of one that is not a number."""
        if self.at_most is not None:
            return value <= self.at_most
        assert self.at_least is not None, "one of the two is given"
        return value >= self.at_least

    def told(self, value: float) -> str:
        """That it holds, for a person."""
        rule = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{self.metric} = {value:.6g} is {rule} (stop_when)"


class CheckpointConfig(Section):
    """What a run saves so that it can go on, and when it ends early."""

    save_interval: NonNegativeInt = 0  # iterations between checkpoints; 0: none for their number
    save_minutes: PositiveFloat | None = 30.0  # between checkpoints, beside save_interval; None: none for the time
    keep_last: PositiveInt = 2
    keep_every: PositiveInt | None = None  # also those of iterations that this divides
    keep_best: NonNegativeInt = 0  # also so many of those whose best_metric was best
    best_metric: str = "reward/score_mean"
    best_is: Literal["auto", "highest", "lowest"] = "auto"  # auto: by its name: of losses, KLs, errors, seconds lowest
    async_save: bool = False  # training goes on once all is copied to host memory
    load: PathText = "auto"  # auto: the latest of the run directory; none: start anew; PATH of another: a fork
    save_rollout: bool = False  # keep the responses of an iteration until it is over
    on_error: Literal["stop", "continue"] = "stop"  # when a checkpoint cannot be written
    grace_seconds: PositiveFloat = 300.0  # from a signal to the end of the run
    max_hours: PositiveFloat | None = None  # save and end before this has passed since the start
    max_restarts_without_progress: PositiveInt = 3  # of torchrun's restarts, that begin where the one before began

    @property
    def saves(self) -> bool:
        """Whether a run saves before it is told to stop."""
        return bool(self.save_interval) or self.save_minutes is not None

    @property
    def keeps(self) -> Literal["highest", "lowest"]:
        """Which values of best_metric are the best."""
        if self.best_is != "auto":
            return self.best_is
        return "lowest" if lower_is_better(self.best_metric) else "highest"


class WatchdogConfig(Section):
    """Seconds that a rank may be in a phase of the run; then all ranks end, with a report on who is stuck."""

    start_seconds: PositiveFloat = 3600.0  # building the models and the engine, loading a checkpoint
    rollout_seconds: PositiveFloat = 7200.0
    estimate_seconds: PositiveFloat = 3600.0  # scoring
    update_seconds: PositiveFloat = 7200.0
    evaluate_seconds: PositiveFloat = 7200.0
    save_seconds: PositiveFloat = 3600.0

    def deadlines(self) -> dict[str, float]:
        """Seconds by phase."""
        return {name.removesuffix("_seconds"): seconds for name, seconds in self}


ENVIRONMENT_PREFIXES = ("NCCL_", "GLOO_", "HF_")


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


class RunConfig(Section):
    """What every run has, whatever it learns from: from what the engine generates, or from fixed data."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    seed: NonNegativeInt = 0
    platform: PlatformName = "auto"  # auto: CUDA where torch is built for it, and an error where it then sees no device
    output_dir: PathText = "runs"
    env_vars: Annotated[dict[str, str], BeforeValidator(_environment)] = {}  # NCCL_*, GLOO_*, HF_*, where not set
    device_profile: str | None = None  # what `auto` goes by: a shipped profile or a file; None: by the device's name
    tensor_parallel_across_hosts: bool = False  # else each tensor-parallel group has to lie on one host
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    stop_when: StopConfig | None = None  # None: after all iterations
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    metrics: MetricsConfig = MetricsConfig()

    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should change in the file that this was read from."""
        return self._notes

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        stop = self.stop_when
        if stop is not None and stop.metric.startswith("eval/") and not self.metrics.eval_interval:
            raise ValueError(f"stop_when.metric = {stop.metric} needs metrics.eval_interval, which is 0")
        return self

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    def roles(self) -> dict[str, RoleConfig]:
        """Every model of the run by the config key that names it."""
        raise NotImplementedError

    def layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Each role's layout on `world_size` ranks. What is wrong is noted; a role that has none is left out."""
        raise NotImplementedError

    def check_world_size(self, world_size: int) -> None:
        """Raise ConfigError, with all reasons, unless the models, and the engine if there is one, can be placed."""
        reasons = Reasons()
        self.layouts(world_size, reasons)
        reasons.refuse()

    def role_layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Of the roles that have one: each grid fills its ranks."""
        found = {name: reasons.of(role.layout, name, world_size) for name, role in self.roles().items()}
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
        tree, notes = renamed(tree, source)
        try:
            found = cls.model_validate(tree)
            found._notes = notes
            return found
        except ValidationError as error:
            raise ConfigError(explained(error, cls, source)) from error
