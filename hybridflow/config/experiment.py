"""The config of a run that learns from responses of the engine: frozen, and validated.

    config = ExperimentConfig.from_yaml("configs/quickstart.yaml", ["actor.optimizer.lr=1e-5", "seed=3"])

Unknown keys are errors that name the nearest known one. Everything that can be checked without reading a model is
checked here, once; nothing later asks whether a field is there.
"""

from math import ceil
from typing import Any, ClassVar, Self

from pydantic import PositiveInt, model_validator

from hybridflow.config.algorithms import OPO, PPO, Custom, Distill
from hybridflow.config.best_metric import AREAS, check_best_metric
from hybridflow.config.data import DataConfig
from hybridflow.config.gym_rewards import with_scorer
from hybridflow.config.old_keys import AlgorithmConfig
from hybridflow.config.ranks import check_engine_ranks, check_engine_sizes, check_placement, check_ranks
from hybridflow.config.roles import LayoutConfig, RewardConfig, RoleConfig, RolloutConfig, TrainedRoleConfig
from hybridflow.config.run import RunConfig
from hybridflow.config.sampling import SamplingConfig
from hybridflow.config.staleness import check_staleness, with_correction
from hybridflow.config.vendor_arguments import vendor_lines
from hybridflow.errors import ConfigError, Mendable, Reasons, around, divisors, remedy
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.ranks import counted, shown

MINI_BATCH = "algorithm.update.mini_batch_size"


class ExperimentConfig(RunConfig):
    """A run that learns from responses of the engine."""

    generates: ClassVar[bool] = True
    length_keys: ClassVar[str] = "data.max_prompt_length + sampling.max_response_length"  # of the longest sequence
    rows_key: ClassVar[str] = "data.prompts_per_iteration"  # of data, an iteration

    num_iterations: PositiveInt
    """Iterations of the run. One iteration generates a batch of responses and trains on it."""
    data: DataConfig
    """The prompts: files, columns, and limits of length."""
    sampling: SamplingConfig
    """How responses are drawn."""
    actor: TrainedRoleConfig
    """The model that is trained and that generates."""
    critic: TrainedRoleConfig | None = None
    """The model that predicts values. Required by algorithms with a critic, refused by others."""
    reference: RoleConfig | None = None
    """The model that the KL is measured to; for distill the teacher. Required where the algorithm uses one. null: with
    actor.lora the actor without adapters, or with those of actor.lora.adapter_path."""
    reward: RewardConfig | None = None
    """What scores a response. Required by all algorithms but distill and custom."""
    rollout: RolloutConfig = RolloutConfig()
    """The vLLM engine that generates responses."""
    algorithm: AlgorithmConfig = PPO()
    """The name and the keys of the algorithm. A section without a name is ppo."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        data, algorithm = self.data, self.algorithm
        for check in (
            self._check_scores_and_turns,
            self._check_roles,
            self._check_reset,
            lambda: self.sampling.check_buckets(data.max_prompt_length, may_vary=not isinstance(algorithm, Custom)),
            self._check_batch,
            lambda: check_staleness(self),
            lambda: self.check_budgets(self.max_sequence_length, self.length_keys),
            self._check_scores,
            self._check_best,
        ):
            check()
        profile = self.metrics.profile
        if profile is not None and (wrong := profile.why_not_within(self.num_iterations)):
            raise ValueError(wrong)
        self._check_evaluation()
        return self

    def _check_evaluation(self) -> None:
        """Something says what is right in evaluations, and sets have their turn at some of these."""
        every = self.metrics.eval_interval
        if every and not (self.metrics.eval_reward or self.data.environment or self.reward_functions_judge):
            who = "metrics.eval_reward, data.environment, or functions in reward"
            raise Mendable(f"metrics.eval_interval = {every} needs {who}", {"metrics.eval_interval": [0]})
        for name, each in self.data.heldout_sets.items():
            key, own = f"data.heldout.{name}.interval", each.interval
            if own is not None and not every:
                why = f"{key} = {own} needs metrics.eval_interval, which is 0"
                raise Mendable(why, {"metrics.eval_interval": [own], key: [None]})
            if own is not None and own % every:
                why = f"{key} = {own}: is no multiple of metrics.eval_interval = {every}"
                raise Mendable(why, {key: around(own, range(every, own + every, every))})

    @property
    def reward_functions_judge(self) -> bool:
        """Whether nothing else says what is right in evaluations: the weighted sum of reward.functions and .remote."""
        scoring = self.reward
        judges = [] if scoring is None else [*scoring.remote, *(f for f in scoring.functions if not f.shapes_length)]
        return bool(judges) and self.metrics.eval_reward is None and self.data.environment is None

    def with_chat_template(self, known: bool) -> "ExperimentConfig":
        """With what data.chat_template = null has come to, which the run's directory and checkpoints then say."""
        data = self.data.model_copy(update={"chat_template": known})
        return self.model_copy(update={"data": data})

    @model_validator(mode="before")
    @classmethod
    def _environment_rewards(cls, given: Any) -> Any:
        """With an environment, which gives a reward, a config needs no section `reward`."""
        data = given.get("data") if isinstance(given, dict) else None
        has = data.get("environment") if isinstance(data, dict) else getattr(data, "environment", None)
        if has is None or given.get("reward") is not None:
            return given
        return {**given, "reward": {}}

    @model_validator(mode="before")
    @classmethod
    def _rewards_of_tasks(cls, given: Any) -> Any:
        """Tasks of reasoning-gym bring their scorer, unless the class of an environment gives the reward."""
        return with_scorer(given) if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _correction(cls, given: Any) -> Any:
        """Stale rollouts have importance weights, unless the config says otherwise."""
        return with_correction(given) if isinstance(given, dict) else given

    def _check_scores_and_turns(self) -> None:
        """Something scores a response, and a turn of the model is long enough."""
        reward, environment = self.reward, self.data.environment
        if environment is None and reward is not None and not (reward.models or reward.functions or reward.remote):
            raise ValueError("reward: names neither a model nor a function: give reward.models or reward.functions")
        longest = None if environment is None else environment.max_turn_tokens
        if longest is not None and longest < self.sampling.min_response_length:
            least = self.sampling.min_response_length
            raise Mendable(
                f"data.environment.max_turn_tokens = {longest} is below sampling.min_response_length = {least}",
                {"data.environment.max_turn_tokens": [least], "sampling.min_response_length": [longest]},
            )

    def _check_best(self) -> None:
        """The metric that checkpoints are kept by is one of the run; a flow of your own may have any."""
        if not self.checkpoint.keep_best or isinstance(self.algorithm, Custom):
            return
        lacking = {name for name in ("critic", "reward") if getattr(self, name) is None} | {"reward_model"}
        lacking |= {"environment"} if self.data.environment is None else set()
        metric, kind = self.checkpoint.best_metric, f"a run of {self.algorithm.name}"
        check_best_metric(metric, AREAS - lacking, eval_interval=self.metrics.eval_interval, kind=kind)

    def _check_roles(self) -> None:
        name, why = self.algorithm.name, f"algorithm {self.algorithm.name}"
        with_kl = f"{name} with algorithm.kl.use = {self.algorithm.kl.use}"
        self.check_sections(self.algorithm.needs(), {"critic": why, "reference": with_kl, "reward": why})

    @property
    def reference_is_base(self) -> bool:
        left_out = self.reference is None and "reference" in self.algorithm.needs()
        return left_out and self.actor.lora is not None and not isinstance(self.algorithm, Distill)

    def _check_reset(self) -> None:
        """A reference that becomes the actor lies on the actor's ranks: each rank copies the rank's own weights."""
        interval = self.algorithm.kl.reset_reference_interval
        if interval is None or self.reference is None:
            return
        for key in LayoutConfig.model_fields:
            mine, actors = getattr(self.reference, key), getattr(self.actor, key)
            if key not in ("data_parallel_size", "sequence_parallel") and mine != actors:
                raise Mendable(
                    f"algorithm.kl.reset_reference_interval = {interval} copies the actor's weights rank by rank: "
                    f"reference.{key} = {mine} and actor.{key} = {actors} must be the same",
                    {f"reference.{key}": [shown(actors) if key == "ranks" and actors else actors]},
                )

    def _check_batch(self) -> None:
        batch, kl = self.batch_size, self.algorithm.kl
        self._check_mini_batch()
        if isinstance(self.algorithm, OPO) and self.mini_batch_size != batch:
            raise Mendable(
                f"algorithm.update.mini_batch_size = {self.mini_batch_size}: opo is exactly on-policy and takes one "
                f"step with all {batch} sequences of an iteration",
                {MINI_BATCH: [None]},
            )
        if kl.controller == "adaptive" and batch >= 5 * kl.horizon:
            raise Mendable(
                f"algorithm.kl.horizon = {kl.horizon} is too short for {batch} sequences an iteration. One step may "
                f"change the coefficient by 0.2 x {batch} / {kl.horizon}, which must stay below 1",
                {"algorithm.kl.horizon": [batch // 5 + 1]},
            )

    def _check_mini_batch(self) -> None:
        prompts, batch, most = self.data.prompts_per_iteration, self.batch_size, max(self.sampling.samples.values)
        size, whole = self.mini_batch_size, self.algorithm.update.whole_prompts
        nearest = around(size, [each for each in divisors(batch) if not whole or each % most == 0])
        if whole and size % most:
            raise Mendable(
                f"algorithm.update.whole_prompts = true: {MINI_BATCH} = {size} is "
                f"no multiple of sampling.samples_per_prompt = {most}",
                {MINI_BATCH: nearest},
            )
        if self.sampling.samples.varies and size > batch:
            raise Mendable(
                f"{MINI_BATCH} = {size} exceeds the most sequences of an iteration: "
                f"data.prompts_per_iteration x the largest samples_per_prompt = {prompts} x {most} = {batch}",
                {MINI_BATCH: [batch]},
            )
        if not self.sampling.samples.varies and batch % size:
            raise Mendable(
                f"{MINI_BATCH} = {size} does not divide the sequences of an "
                f"iteration: data.prompts_per_iteration x sampling.samples_per_prompt = {prompts} x {most} = {batch}",
                {MINI_BATCH: nearest},
            )

    def _by_bucket(self, key: str) -> list[tuple[str, Any]]:
        """(name, value) of a key of `sampling`, from the section and from each bucket."""
        found = [(f"sampling.{key}", getattr(self.sampling, key))]
        for i, bucket in enumerate(self.sampling.by_prompt_length):
            if getattr(bucket, key) is not None:
                found.append((f"sampling.by_prompt_length.{i}.{key}", getattr(bucket, key)))
        return found

    def _check_scores(self) -> None:
        """What shapes scores leaves them as the algorithm takes them."""
        reward = self.reward
        for name, limit in self._by_bucket("max_response_length"):
            if reward is not None and reward.overlong is not None and reward.overlong.buffer > limit:
                why = f"reward.overlong.buffer = {reward.overlong.buffer} is longer than {name} = {limit}"
                raise Mendable(why, {"reward.overlong.buffer": [limit]})

    @property
    def batch_size(self) -> int:
        """Sequences of an iteration; the most where samples_per_prompt goes by the length of a prompt."""
        return self.data.prompts_per_iteration * max(self.sampling.samples.values)

    @property
    def mini_batch_size(self) -> int:
        return self.algorithm.update.mini_batch_size or self.batch_size

    @property
    def fewest_rows(self) -> int:
        """Rows of a step, of which each replica of a trained model gets one or more."""
        return min(self.mini_batch_size, self.data.prompts_per_iteration * min(self.sampling.samples.values))

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_prompt_length + self.sampling.max_response_length

    def shortened(self, most: int) -> dict[str, list[Any]]:
        """Settings, as of `remedy`, with which the longest sequence has `most` tokens: of one key where that is
        enough."""
        prompt, response = "data.max_prompt_length", "sampling.max_response_length"
        sizes = {response: most - self.data.max_prompt_length, prompt: most - self.sampling.max_response_length}
        alone = {key: [size] for key, size in sizes.items() if size > 0}
        return alone or {prompt: [f"{most // 2} {response}={most - most // 2}"]}

    @property
    def rollout_tensor_parallel_size(self) -> int:
        return self.rollout.tensor_parallel_size or self.actor.tensor_parallel_size

    @property
    def generates_beside(self) -> bool:
        """Whether the engine generates while the models train: nothing is offloaded then."""
        return self.rollout.is_one_step_off

    @property
    def rollout_expert_parallel(self) -> bool:
        given = self.rollout.enable_expert_parallel
        return self.actor.expert_parallel_size > 1 if given is None else given

    def bucket_bytes(self, *, cuda: bool) -> int:
        """Of the buckets in which the actor's weights live and travel."""
        return self.rollout.bucket_bytes(cuda=cuda)

    def roles(self) -> dict[str, RoleConfig]:
        """Every model of the run by the config key that names it."""
        models = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        rewards = {f"reward.models.{i}": model for i, model in enumerate(self.reward.models if self.reward else ())}
        return {name: model for name, model in models.items() if model is not None} | rewards

    def vendor_lines(self) -> list[str]:
        """What the run hands on to megatron-core and vLLM; a line a key."""
        return [*super().vendor_lines(), *vendor_lines({"rollout.engine_arguments": self.rollout.engine_arguments})]

    def layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Each role's layout on `world_size` ranks. What is wrong is noted; a role that has none is left out.

        Grids fill the ranks of roles, replicas of roles get rows, engine replicas fill the engine, no rank is idle.
        """
        layouts = self.role_layouts(world_size, reasons)
        for name, layout in layouts.items():
            reasons.collect(self._check_replicas, name, layout)
        reasons.collect(self._check_engine, layouts.get("actor"), world_size)
        if not reasons.lines:
            placed = {f"{name}.ranks": layout.ranks for name, layout in layouts.items()}
            reasons.collect(check_placement, placed | {"rollout.ranks": self.rollout_ranks(world_size)}, world_size)
        return layouts

    def _check_replicas(self, name: str, layout: Layout) -> None:
        fewest, prompts = self.fewest_rows, self.data.prompts_per_iteration
        if not isinstance(self.roles()[name], TrainedRoleConfig) or fewest >= layout.dp:
            return
        larger = [size for size in divisors(self.batch_size) if size >= layout.dp]
        what, settings = MINI_BATCH, dict[str, list[Any]]({MINI_BATCH: larger[:1]})
        if fewest < self.mini_batch_size:
            what, settings = "data.prompts_per_iteration x the smallest samples_per_prompt", {}
        if not any(settings.values()):  # as many times the prompts as there have to be, so that mini-batches divide
            times = ceil(layout.dp / (prompts * min(self.sampling.samples.values)))
            whole = f" {MINI_BATCH}=null" if self.mini_batch_size < layout.dp else ""
            settings = {"data.prompts_per_iteration": [f"{times * prompts}{whole}"]}
        raise ConfigError(
            f"{what} = {fewest} leaves replicas of {name} without "
            f"a sequence: {name} has data_parallel_size {layout.dp} on {counted(len(layout.ranks))}{remedy(settings)}"
        )

    def _check_engine(self, actor: Layout | None, world_size: int) -> None:
        check_ranks("rollout.ranks", self.rollout.ranks, world_size)
        if actor is not None:
            ranks = self.rollout_ranks(world_size)
            check_engine_ranks(ranks, actor.ranks)
            check_engine_sizes(self.rollout_tensor_parallel_size, self.rollout.pipeline_parallel_size, len(ranks))

    def rows_of_replica(self, num_replicas: int = 1) -> int:
        """Responses that an engine replica gives in an iteration, at most."""
        partial = self.rollout.partial
        prompts = ceil(self.data.prompts_per_iteration * (1.0 if partial is None else partial.oversample))
        return ceil(prompts / num_replicas) * max(self.sampling.samples.values)

    def rollout_ranks(self, world_size: int) -> tuple[int, ...]:
        """Where the engine runs: by default on the actor's ranks."""
        return self.rollout.ranks or self.actor.ranks or tuple(range(world_size))
