"""The experiment config: frozen, validated, and the only reader of YAML.

    config = ExperimentConfig.from_yaml("configs/quickstart.yaml", ["actor.optimizer.lr=1e-5", "seed=3"])

Unknown keys are errors that name the nearest known one. Everything that can be checked without reading a model is
checked here, once; nothing later asks whether a field is there.
"""

import difflib
import itertools
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from hybridflow.algorithm_config import (
    ALGORITHMS,
    OPO,
    PPO,
    Algorithm,
    Custom,
    MaxRL,
    Section,
    check_parts,
    compares_responses,
)
from hybridflow.by_length import ByLength
from hybridflow.data_config import DataConfig
from hybridflow.errors import ConfigError, Reasons
from hybridflow.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.foreign_keys import algorithm_hint, hint, leaves
from hybridflow.parallel.layout import Layout, PlatformName
from hybridflow.placement import (
    Ranks,
    check_engine_ranks,
    check_engine_sizes,
    check_placement,
    check_ranks,
    check_sizes,
    parse_ranks,
    shown,
)
from hybridflow.reward_config import ScoringConfig

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
RanksKey = Annotated[Ranks, BeforeValidator(parse_ranks), PlainSerializer(shown)]


class PromptLengthConfig(Section):
    """What is another for prompts of some length than `sampling` says. None: as there."""

    up_to: PositiveInt  # prompt tokens, inclusive: the first bucket that a prompt fits in is its own
    samples_per_prompt: PositiveInt | None = None
    temperature: PositiveFloat | None = None
    max_response_length: PositiveInt | None = None  # at most that of the section

    def replaced(self) -> dict[str, Any]:
        return self.model_dump(exclude={"up_to"}, exclude_none=True)


REPLACED = tuple(key for key in PromptLengthConfig.model_fields if key != "up_to")


class SamplingConfig(Section):
    """How responses are drawn; the names and meanings are vLLM's.

    by_prompt_length: buckets in ascending order; prompts longer than the last are sampled as the section says. A row is
    trained on at the temperature that it was sampled at, is cut at the limit it was generated under, and
    reward.overlong counts from that limit; loss_mean constant divides by the section's max_response_length. Greedy
    responses, to held-out prompts and of remax, have the limit of their bucket, one response a prompt, and temperature
    0. Where samples_per_prompt varies the sequences of an iteration do too: algorithm.update.mini_batch_size is then
    the most of a step, and an epoch is cut in as few mini-batches as that allows, of nearly equal size.
    """

    samples_per_prompt: PositiveInt = 1
    max_response_length: PositiveInt  # tokens, the end token included
    min_response_length: NonNegativeInt = 0
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0  # 0: all
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: PositiveFloat = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[NonNegativeInt, ...] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    by_prompt_length: tuple[PromptLengthConfig, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_response_length > self.max_response_length:
            raise ValueError(
                f"min_response_length = {self.min_response_length} exceeds "
                f"max_response_length = {self.max_response_length}"
            )
        return self

    def sections(self) -> "tuple[SamplingConfig, ...]":
        """What holds in each bucket, and last what holds for longer prompts."""
        alone = self.model_copy(update={"by_prompt_length": ()})
        return (*(alone.model_copy(update=bucket.replaced()) for bucket in self.by_prompt_length), alone)

    @property
    def buckets(self) -> ByLength[int]:
        """The number of a prompt's entry in `sections`."""
        return ByLength(self._ends, tuple(range(len(self._ends) + 1)))

    @property
    def samples(self) -> ByLength[int]:
        """samples_per_prompt of each bucket."""
        return ByLength(self._ends, tuple(section.samples_per_prompt for section in self.sections()))

    @property
    def temperatures(self) -> ByLength[float]:
        return ByLength(self._ends, tuple(section.temperature for section in self.sections()))

    @property
    def limits(self) -> ByLength[int]:
        """max_response_length of each bucket, in tokens."""
        return ByLength(self._ends, tuple(section.max_response_length for section in self.sections()))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(bucket.up_to for bucket in self.by_prompt_length)

    def changed_distribution(self) -> list[str]:
        """The keys, as `sampling.top_p = 0.9`, by which tokens are not drawn from the whole softmax at a temperature.

        min_response_length and stop words are not among them: of a response they change the end alone.
        """
        neutral = SamplingConfig(max_response_length=1)
        keys = ["top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
        keys += ["bad_words", "allowed_token_ids", "logit_bias"]
        return [f"sampling.{key} = {getattr(self, key)}" for key in keys if getattr(self, key) != getattr(neutral, key)]


class OptimizerConfig(Section):
    """Adam (AdamW) or SGD in float32 main weights. The learning rate follows its schedule by iteration."""

    name: Literal["adam", "sgd"] = "adam"
    lr: NonNegativeFloat
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_iterations: NonNegativeInt = 0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # sgd only
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0  # global gradient norm; 0: no clipping
    zero1: bool = True  # split optimizer state over the data-parallel replicas (adam only)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} exceeds lr = {self.lr}")
        return self


class LayoutConfig(Section):
    """How one role is cut over ranks: tensor x pipeline x data parallel sizes are as many as its ranks."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    virtual_pipeline_parallel_size: PositiveInt = 1  # model chunks per stage: the interleaved schedule
    num_layers_in_first_pipeline_stage: PositiveInt | None = None  # None: as many as in the others
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    data_parallel_size: PositiveInt | None = None  # None: what is left of the ranks
    sequence_parallel: bool = False
    ranks: RanksKey | None = None  # "0-7,12"; None: all ranks of the run

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError("sequence_parallel needs tensor_parallel_size > 1, it is 1")
        for key, neutral in (
            ("virtual_pipeline_parallel_size", 1),
            ("num_layers_in_first_pipeline_stage", None),
            ("num_layers_in_last_pipeline_stage", None),
        ):
            if self.pipeline_parallel_size == 1 and getattr(self, key) != neutral:
                raise ValueError(f"{key} = {getattr(self, key)} needs pipeline_parallel_size > 1, it is 1")
        return self

    def layout(self, name: str, world_size: int) -> Layout:
        """The layout of the role `name` among `world_size` ranks. Errors: ConfigError unless it fills its own."""
        ranks = check_ranks(f"{name}.ranks", self.ranks, world_size)
        sizes = self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
        check_sizes(name, sizes, self.ranks, ranks)
        return self.layout_on(ranks)

    def layout_on(self, ranks: tuple[int, ...]) -> Layout:
        """With as many replicas as they make."""
        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        return Layout(
            tp=tp,
            pp=pp,
            dp=len(ranks) // (tp * pp),
            ranks=ranks,
            vpp=self.virtual_pipeline_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
        )


class RoleConfig(LayoutConfig):
    """A model on a grid."""

    model: str  # a HuggingFace directory, or the torch_dist checkpoint that `tools.convert` makes of one
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    micro_batch_tokens: PositiveInt = 16384  # tokens per forward pass and replica, at most


class TrainedRoleConfig(RoleConfig):
    optimizer: OptimizerConfig
    recompute: Literal["none", "selective", "full"] = "none"
    offload_optimizer: bool = False  # optimizer state waits in host memory while the engine generates
    offload_gradients: bool = False  # the gradient buffers are given back while the engine generates


class RewardModelConfig(RoleConfig):
    weight: float = 1.0


class RewardConfig(ScoringConfig):
    """The score of a response: the weighted sum of reward models, reward functions and remote ones."""

    models: tuple[RewardModelConfig, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.models and not self.functions and not self.remote:
            raise ValueError("names neither a model nor a function: give reward.models or reward.functions")
        return self


class RolloutConfig(Section):
    """The vLLM engine: replicas of tensor x pipeline parallel ranks, on the actor's ranks or on ranks of its own."""

    tensor_parallel_size: PositiveInt | None = None  # None: the actor's
    pipeline_parallel_size: PositiveInt = 1
    ranks: RanksKey | None = None  # None: the actor's; as in the roles. Own ranks receive the weights
    # per rank. None: what a replica's share of the batch takes where each response is as long as it may be, and no more
    # than half of the memory that is free when the engine is built
    kv_cache_gib: PositiveFloat | None = None
    sleep_level: Literal[0, 1] = 1  # 1: the KV cache is given back while the models train
    # the actor's weights travel in buckets: what is held twice or under way. None: 256 on GPUs; 24 on a CPU, whose
    # allocator gives larger blocks back to the system and takes them page by page again
    reshard_bucket_mib: PositiveFloat | None = None
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 8192
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    # whether a replica whose responses are done scores them while others generate; false: the models begin together.
    # It takes no more memory than training: the cache and the engine's weights are given back before.
    # None: on CPUs, where it was measured, and not on GPUs
    score_while_waiting: bool | None = None

    def scores_while_waiting(self, *, cuda: bool) -> bool:
        return not cuda if self.score_while_waiting is None else self.score_while_waiting

    def batched_tokens(self, longest: int, *, cuda: bool) -> int:
        """Of one step of the engine. Where prompts are not cut in chunks, as on CPUs, one of `longest` tokens fits."""
        return max(self.max_num_batched_tokens, self.max_num_seqs, 0 if cuda else longest)

    def bucket_bytes(self, *, cuda: bool) -> int:
        return int((self.reshard_bucket_mib or (256 if cuda else 24)) * (1 << 20))


# where the keys of configs without a name went: before there were names, there was PPO with these
MOVED = {
    "clip_range": "policy",
    "clip_range_high": "policy",
    "dual_clip": "policy",
    "entropy_coef": "policy",
    "importance_cap": "policy",
    "ppo_epochs": "update",
    "mini_batch_size": "update",
}


def _moved_to(key: str) -> str:
    return {"ppo_epochs": "update.epochs", "importance_cap": "policy.importance.cap"}.get(key, f"{MOVED[key]}.{key}")


def _moved(key: str, value: Any) -> dict[str, Any]:
    """What an old key is in the section that it went to; nothing where it turned off what is off unless it is given."""
    if key in ("dual_clip", "importance_cap") and value is None:
        return {}
    match key:
        case "dual_clip":
            return {"dual_clip": value, "kind": "dual_clip"}
        case "importance_cap":
            return {"importance": {"kind": "token", "cap": value}}
        case "ppo_epochs":
            return {"epochs": value}
    return {key: value}


def _named(given: Any) -> Any:
    """An `algorithm` section without a name is PPO's; the keys that it had of old go where they are now."""
    if not isinstance(given, dict) or "name" in given:
        return given
    tree = {key: value for key, value in given.items() if key not in MOVED}
    for key, section in MOVED.items():
        if key not in given:
            continue
        new, part = _moved(key, given[key]), tree.get(section) or {}
        if not isinstance(part, dict) or (new.keys() - {"kind"}) & part.keys():
            raise ValueError(f"{key} is now {_moved_to(key)}, which is given too: leave one out")
        tree[section] = part | new
    return {"name": "ppo", **tree}


AlgorithmConfig = Annotated[Algorithm, Field(discriminator="name"), BeforeValidator(_named)]


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
    eval_reward: str | None = None  # package.module:function whose 1.0 counts as right in eval/accuracy
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

    save_interval: NonNegativeInt = 0  # iterations between checkpoints; 0: only when the run is told to stop
    keep_last: PositiveInt = 2
    keep_every: PositiveInt | None = None  # also those of iterations that this divides
    keep_best: NonNegativeInt = 0  # also so many of those whose best_metric was highest
    best_metric: str = "reward/score_mean"
    async_save: bool = False  # training goes on once all is copied to host memory
    load: str = "auto"  # auto: the latest of the run directory; none: start anew; PATH of another: a fork
    save_rollout: bool = False  # keep the responses of an iteration until it is over
    on_error: Literal["stop", "continue"] = "stop"  # when a checkpoint cannot be written
    grace_seconds: PositiveFloat = 300.0  # from a signal to the end of the run
    max_hours: PositiveFloat | None = None  # save and end before this has passed since the start
    max_restarts_without_progress: PositiveInt = 3  # of torchrun's restarts, that begin where the one before began


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
    output_dir: str = "runs"
    environment: Annotated[dict[str, str], BeforeValidator(_environment)] = {}  # NCCL_*, GLOO_*, HF_*, where not set
    device_profile: str | None = None  # what `auto` goes by: a shipped profile or a file; None: by the device's name
    tensor_parallel_across_hosts: bool = False  # else each tensor-parallel group has to lie on one host
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    stop_when: StopConfig | None = None  # None: after all iterations
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    metrics: MetricsConfig = MetricsConfig()

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
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(_explain(error, cls, source)) from error


class ExperimentConfig(RunConfig):
    """A run that learns from responses which its engine generates."""

    num_iterations: PositiveInt
    data: DataConfig
    sampling: SamplingConfig
    actor: TrainedRoleConfig
    critic: TrainedRoleConfig | None = None  # this one and the next two: where the algorithm has them
    reference: RoleConfig | None = None
    reward: RewardConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = PPO()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_parts(self.algorithm)
        for check in (
            self._check_roles,
            self._check_reset,
            self._check_buckets,
            self._check_batch,
            self._check_sampling,
            self._check_lengths,
            self._check_scores,
            self._check_rounds,
        ):
            check()
        if self.metrics.eval_interval and not (self.data.heldout and self.metrics.eval_reward):
            raise ValueError(
                f"metrics.eval_interval = {self.metrics.eval_interval} needs data.heldout and metrics.eval_reward"
            )
        return self

    def _check_roles(self) -> None:
        """The sections that the algorithm needs are there, and no others."""
        needed, kl = self.algorithm.needs(), f"algorithm.kl.use = {self.algorithm.kl.use}"
        for name in ("critic", "reference", "reward"):
            given = getattr(self, name) is not None
            why = f"{self.algorithm.name} with {kl}" if name == "reference" else f"algorithm {self.algorithm.name}"
            if name in needed and not given:
                raise ValueError(f"{name}: is required by {why}: add the section {name}")
            if given and name not in needed:
                raise ValueError(f"{name}: {why} has none: remove the section {name}, or set {name}=null")

    def _check_reset(self) -> None:
        """A reference that becomes the actor lies where the actor does: each rank copies its own."""
        interval = self.algorithm.kl.reset_reference_interval
        if interval is None or self.reference is None:
            return
        for key in LayoutConfig.model_fields:
            mine, actors = getattr(self.reference, key), getattr(self.actor, key)
            if key not in ("data_parallel_size", "sequence_parallel") and mine != actors:
                raise ValueError(
                    f"algorithm.kl.reset_reference_interval = {interval} copies the actor's weights where they lie: "
                    f"reference.{key} = {mine} and actor.{key} = {actors} must be the same"
                )

    def _check_buckets(self) -> None:
        """Those of sampling.by_prompt_length ascend, each is of some prompt, and says what the section allows."""
        before = 0
        for i, bucket in enumerate(self.sampling.by_prompt_length):
            name = f"sampling.by_prompt_length.{i}"
            if not bucket.replaced():
                raise ValueError(
                    f"{name}: replaces nothing: give one of {', '.join(REPLACED)}, or leave the bucket out"
                )
            if bucket.up_to <= before:
                raise ValueError(f"{name}.up_to = {bucket.up_to}: buckets ascend, the one before ends at {before}")
            if before >= self.data.max_prompt_length:
                raise ValueError(
                    f"{name}.up_to = {bucket.up_to}: no prompt is in this bucket, the one before ends at {before} and "
                    f"data.max_prompt_length = {self.data.max_prompt_length}"
                )
            self._check_limit(f"{name}.max_response_length", bucket.max_response_length)
            if isinstance(self.algorithm, Custom) and self.sampling.samples.varies and bucket.samples_per_prompt:
                raise ValueError(
                    f"{name}.samples_per_prompt = {bucket.samples_per_prompt}: a flow of your own may take the "
                    f"responses of a prompt to be equally many: leave it out, or give all buckets the same as sampling"
                )
            before = bucket.up_to

    def _check_limit(self, name: str, limit: int | None) -> None:
        """The section's limit is the longest: positions, KV cache and budgets of tokens are made for it."""
        sampling = self.sampling
        if limit is not None and limit > sampling.max_response_length:
            raise ValueError(f"{name} = {limit} exceeds sampling.max_response_length = {sampling.max_response_length}")
        if limit is not None and limit < sampling.min_response_length:
            raise ValueError(f"{name} = {limit} is below sampling.min_response_length = {sampling.min_response_length}")

    def _check_batch(self) -> None:
        batch, kl = self.batch_size, self.algorithm.kl
        self._check_mini_batch()
        for name, samples in self._by_bucket("samples_per_prompt"):
            if compares_responses(self.algorithm) and samples == 1:
                raise ValueError(
                    f"{name} = 1: algorithm {self.algorithm.name} compares the responses of a prompt "
                    f"with each other, it needs at least 2"
                )
        if isinstance(self.algorithm, OPO) and self.mini_batch_size != batch:
            raise ValueError(
                f"algorithm.update.mini_batch_size = {self.mini_batch_size}: opo is exactly on-policy, it takes one "
                f"step with all {batch} sequences of an iteration: leave it out"
            )
        if kl.controller == "adaptive" and batch >= 5 * kl.horizon:
            raise ValueError(
                f"algorithm.kl.horizon = {kl.horizon} is too short for {batch} sequences an iteration: one step may "
                f"change the coefficient by 0.2 x {batch} / {kl.horizon}, which must stay below 1"
            )

    def _check_mini_batch(self) -> None:
        prompts, batch, most = self.data.prompts_per_iteration, self.batch_size, max(self.sampling.samples.values)
        if self.algorithm.update.whole_prompts and self.sampling.samples.varies:
            raise ValueError(
                "algorithm.update.whole_prompts = true: with sampling.by_prompt_length prompts have unlike numbers of "
                "responses, and mini-batches are cut by responses: leave one out"
            )
        if self.algorithm.update.whole_prompts and self.mini_batch_size % most:
            raise ValueError(
                f"algorithm.update.whole_prompts = true: algorithm.update.mini_batch_size = {self.mini_batch_size} is "
                f"no multiple of sampling.samples_per_prompt = {most}"
            )
        if self.sampling.samples.varies and self.mini_batch_size > batch:
            raise ValueError(
                f"algorithm.update.mini_batch_size = {self.mini_batch_size} exceeds the most sequences of an "
                f"iteration: data.prompts_per_iteration x the largest samples_per_prompt = {prompts} x {most} = {batch}"
            )
        if not self.sampling.samples.varies and batch % self.mini_batch_size:
            raise ValueError(
                f"algorithm.update.mini_batch_size = {self.mini_batch_size} does not divide the sequences of an "
                f"iteration: data.prompts_per_iteration x sampling.samples_per_prompt = {prompts} x {most} = {batch}"
            )

    def _by_bucket(self, key: str) -> list[tuple[str, Any]]:
        """The values of a key of `sampling`, each with its name: the section's own, and those that buckets have."""
        found = [(f"sampling.{key}", getattr(self.sampling, key))]
        for i, bucket in enumerate(self.sampling.by_prompt_length):
            if getattr(bucket, key) is not None:
                found.append((f"sampling.by_prompt_length.{i}.{key}", getattr(bucket, key)))
        return found

    def _check_rounds(self) -> None:
        dynamic = getattr(self.algorithm, "dynamic_sampling", None)
        if dynamic is not None and self.checkpoint.save_rollout:
            raise ValueError(
                "checkpoint.save_rollout = true: with algorithm.dynamic_sampling an iteration has several generations, "
                "which are not kept: leave one out"
            )

    def _check_sampling(self) -> None:
        changed, policy = self.sampling.changed_distribution(), self.algorithm.policy
        if policy.old_log_probs == "engine" and changed:
            raise ValueError(
                f"algorithm.policy.old_log_probs = engine cannot go with {', '.join(changed)}: the engine's log-probs "
                f"are then of the truncated or penalised distribution, and the ratio of the first step would not be 1"
            )
        if policy.importance is not None and changed:
            bound = "kind" if policy.importance.cap is None else "cap"
            raise ValueError(
                f"algorithm.policy.importance.{bound} = {getattr(policy.importance, bound)} cannot go with "
                f"{', '.join(changed)}: the engine's log-probs are then of the truncated or penalised distribution, "
                f"the trainer's of the full one, and the weights would carry the difference of the two"
            )

    def _check_scores(self) -> None:
        """What shapes scores leaves them as the algorithm takes them."""
        reward = self.reward
        for name, limit in self._by_bucket("max_response_length"):
            if reward is not None and reward.overlong is not None and reward.overlong.buffer > limit:
                raise ValueError(f"reward.overlong.buffer = {reward.overlong.buffer} is longer than {name} = {limit}")
        if isinstance(self.algorithm, MaxRL) and reward is not None:
            for key, neutral in (("normalization", "none"), ("truncation_penalty", 0.0), ("overlong", None)):
                if getattr(reward, key) != neutral:
                    raise ValueError(
                        f"reward.{key} = {getattr(reward, key)}: maxrl divides by the mean score of a group, and this "
                        f"makes scores negative: leave it out"
                    )

    def _check_lengths(self) -> None:
        longest = self.max_sequence_length
        for name, role in self.roles().items():
            if role.micro_batch_tokens < longest:
                raise ValueError(
                    f"{name}.micro_batch_tokens = {role.micro_batch_tokens} cannot hold one sequence: "
                    f"data.max_prompt_length + sampling.max_response_length = {longest}"
                )

    @property
    def batch_size(self) -> int:
        """Sequences of an iteration; the most where samples_per_prompt goes by the length of a prompt."""
        return self.data.prompts_per_iteration * max(self.sampling.samples.values)

    @property
    def mini_batch_size(self) -> int:
        return self.algorithm.update.mini_batch_size or self.batch_size

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_prompt_length + self.sampling.max_response_length

    @property
    def rollout_tensor_parallel_size(self) -> int:
        return self.rollout.tensor_parallel_size or self.actor.tensor_parallel_size

    def roles(self) -> dict[str, RoleConfig]:
        """Every model of the run by the config key that names it."""
        models = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        rewards = {f"reward.models.{i}": model for i, model in enumerate(self.reward.models if self.reward else ())}
        return {name: model for name, model in models.items() if model is not None} | rewards

    def layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Each role's layout on `world_size` ranks. What is wrong is noted; a role that has none is left out.

        Every role's grid fills its ranks, its replicas get rows, the engine's replicas fill theirs, all ranks are used.
        """
        layouts = self.role_layouts(world_size, reasons)
        for name, layout in layouts.items():
            reasons.of(self._check_replicas, name, layout)
        reasons.of(self._check_engine, layouts.get("actor"), world_size)
        if not reasons.lines:
            placed = {f"{name}.ranks": layout.ranks for name, layout in layouts.items()}
            reasons.of(check_placement, placed | {"rollout.ranks": self.rollout_ranks(world_size)}, world_size)
        return layouts

    def _check_replicas(self, name: str, layout: Layout) -> None:
        fewest = min(self.mini_batch_size, self.data.prompts_per_iteration * min(self.sampling.samples.values))
        if isinstance(self.roles()[name], TrainedRoleConfig) and fewest < layout.dp:
            what = "algorithm.update.mini_batch_size"
            if fewest < self.mini_batch_size:
                what = "data.prompts_per_iteration x the smallest samples_per_prompt"
            raise ConfigError(
                f"{what} = {fewest} leaves replicas of {name} without "
                f"a sequence: {name} has data_parallel_size {layout.dp} on {len(layout.ranks)} ranks"
            )

    def _check_engine(self, actor: Layout | None, world_size: int) -> None:
        check_ranks("rollout.ranks", self.rollout.ranks, world_size)
        if actor is not None:
            ranks = self.rollout_ranks(world_size)
            check_engine_ranks(ranks, actor.ranks)
            check_engine_sizes(self.rollout_tensor_parallel_size, self.rollout.pipeline_parallel_size, len(ranks))

    def rollout_ranks(self, world_size: int) -> tuple[int, ...]:
        """Where the engine runs: by default on the actor's ranks."""
        return self.rollout.ranks or self.actor.ranks or tuple(range(world_size))


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """What a config file says, with overrides applied; nothing of it is checked yet. Errors: ConfigError."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, this is {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b.0.c=value` in a tree of dicts and lists."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: expected section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
    set_key(tree, keys, value, f"override {override!r}")


def set_key(tree: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    """Set a.b.0.c, for the keys a, b, 0, c, in a tree of dicts and lists. Errors: ConfigError, from `source`."""
    node: Any = tree
    for key, following in itertools.pairwise(keys):
        node = _descend(node, key, source, default=[] if following == "0" else {})
    node[_slot(node, keys[-1], source)] = value


def _descend(node: Any, key: str, source: str, *, default: Any) -> Any:
    """The dict or list at `key` of a dict or list; `default` is put there where there is none."""
    slot = _slot(node, key, source)
    if node[slot] is None:
        node[slot] = default
    if not isinstance(node[slot], dict | list):
        raise ConfigError(f"{source}: {key!r} is {node[slot]!r}, not a section")
    return node[slot]


def _slot(node: Any, key: str, source: str) -> int | str:
    """What `key` stands for in a dict or list, which gets an empty entry there if it has none."""
    if isinstance(node, dict):
        node.setdefault(key)
        return key
    if not key.isdecimal() or int(key) > len(node):
        raise ConfigError(f"{source}: {key!r} is no index of a list of {len(node)}")
    if int(key) == len(node):
        node.append(None)
    return int(key)


def _explain(error: ValidationError, model: type[BaseModel], path: str | Path) -> str:
    lines = []
    for problem in error.errors():
        location = _without_tag(problem["loc"])
        key = ".".join(str(part) for part in location) or "config"
        if problem["type"] == "extra_forbidden":
            lines += _unknown(model, problem["loc"], problem["input"])
        elif problem["type"] == "missing":
            lines.append(f"{key}: is required")
        elif problem["type"] == "union_tag_invalid":
            lines.append(f"{key}.name = {problem['ctx']['tag']!r}: {_no_algorithm(problem['ctx']['tag'])}")
        elif problem["type"] == "value_error":
            lines.append(f"{key}: {problem['ctx']['error']}" if location else str(problem["ctx"]["error"]))
        else:
            lines.append(f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "\n".join(f"{path}: {line}" for line in lines)


EVERY_ALGORITHM = {**ALGORITHMS, **FIXED_ALGORITHMS}


def _without_tag(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """pydantic names the kind of algorithm in between: algorithm.ppo.gamma."""
    tagged = len(location) > 1 and location[0] == "algorithm" and location[1] in EVERY_ALGORITHM
    return (location[0], *location[2:]) if tagged else location


def _no_algorithm(name: object) -> str:
    if name in FIXED_ALGORITHMS:
        return "it trains on fixed data: hybridflow.train reads such a config, and FixedDataTrainer.from_yaml does"
    return f"is no algorithm; {_closest(name)}"


def _closest(name: object) -> str:
    foreign = algorithm_hint(str(name))
    if foreign is not None:
        return foreign
    close = difflib.get_close_matches(str(name), EVERY_ALGORITHM, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(EVERY_ALGORITHM)}"


# from which of difflib's ratios on, and up to how many letters more or less, a key is a slip of the pen; what is less
# like ours may be another trainer's
SLIP, MISSING = 0.88, 2


def _unknown(model: Any, location: tuple[int | str, ...], value: Any) -> list[str]:
    """A line for the unknown key; of a section of another trainer's, for each key in it."""
    path = tuple(map(str, _without_tag(location)))
    nearest, is_close = _nearest(model, location)
    within = [] if is_close else [(".".join(leaf), hint(leaf)) for leaf in leaves(value, path)]
    if not any(said for _, said in within):
        return [f"{'.'.join(path)}: unknown key; {nearest}"]
    others = [key for key, said in within if not said]
    rest = [f"{'.'.join(path)}: {len(others)} more unknown keys in it: {', '.join(others[:3])}, ..."]
    lines = [f"{key}: unknown key; {said}" for key, said in within if said]
    return lines + (rest if len(others) > 3 else [f"{key}: unknown key" for key in others])


def _nearest(model: Any, location: tuple[int | str, ...]) -> tuple[str, bool]:
    """`did you mean x?` out of the keys of the section that `location` lies in; whether it is a slip of the pen."""
    for part in location[:-1]:
        if model is None:
            model = EVERY_ALGORITHM[str(part)]
        elif isinstance(part, str):
            model = None if part == "algorithm" else _section_of(model.model_fields[part].annotation)
    key, known = str(location[-1]), list(model.model_fields)
    if model is PromptLengthConfig and key in SamplingConfig.model_fields:
        return f"it is one for all prompts; what may go by their length is {', '.join(REPLACED)}", True
    moved = {old: _moved_to(old) for old in MOVED} if location[0] == "algorithm" and len(location) == 3 else {}
    if key in moved:
        return f"it is now algorithm.{moved[key]}", True
    close = difflib.get_close_matches(key, [*known, *moved], n=1, cutoff=0.5)
    if not close:
        return f"known are {', '.join(known)}", False
    likeness = difflib.SequenceMatcher(None, key, close[0]).ratio()
    is_slip = likeness >= SLIP and abs(len(key) - len(close[0])) <= MISSING
    return f"did you mean {moved.get(close[0], close[0])}?", is_slip


def _section_of(annotation: Any) -> Any:
    """The section class inside an annotation such as tuple[Section, ...] or Section | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section_of(argument) for argument in getattr(annotation, "__args__", ()) if argument is not Ellipsis)
    return next((section for section in inner if section is not None), None)
