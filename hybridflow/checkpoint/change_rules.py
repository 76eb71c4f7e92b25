"""What a change of a config key, or of what a run is made of, means for a run that goes on or forks: a table."""

from dataclasses import dataclass
from enum import Enum

from hybridflow.formats.weights_digest import WEIGHTS_OF


class Effect(Enum):
    FREE = "yes"
    NOTICED = "with a notice"
    REFUSED = "no"


FREE, NOTICED, REFUSED = Effect.FREE, Effect.NOTICED, Effect.REFUSED


@dataclass(frozen=True)
class ChangeRule:
    """What it means that one of these keys has changed.

    keys: paths, where * is any one key, MODEL any model of the run and TRAINED any that is trained; or names of
    digests.
    """

    keys: tuple[str, ...]
    resume: Effect
    fork: Effect
    why: str

    def effect(self, *, fork: bool) -> Effect:
        return self.fork if fork else self.resume


def _rule(keys: str, resume: Effect, fork: Effect, why: str) -> ChangeRule:
    return ChangeRule(tuple(keys.split()), resume, fork, why)


MODELS = ("actor", "critic", "reference", "reward.models.*", "reward_model")


TRAINED = ("actor", "critic", "reward_model")


TABLE: tuple[ChangeRule, ...] = (
    # ---- where and how the same is computed
    _rule("name output_dir", FREE, FREE, "where the run is written; checkpoint.load: auto looks there"),
    _rule(
        "platform MODEL.tensor_parallel_size MODEL.pipeline_parallel_size MODEL.virtual_pipeline_parallel_size "
        "MODEL.num_layers_in_first_pipeline_stage MODEL.num_layers_in_last_pipeline_stage MODEL.data_parallel_size "
        "MODEL.expert_parallel_size MODEL.expert_tensor_parallel_size MODEL.sequence_parallel MODEL.ranks "
        "MODEL.micro_batch_tokens MODEL.token_dispatcher MODEL.context_parallel_size",
        FREE,
        FREE,
        "the same mathematics, summed in another order: equal up to rounding",
    ),
    _rule(
        "TRAINED.recompute TRAINED.offload_optimizer TRAINED.offload_gradients TRAINED.optimizer.zero1 TRAINED.overlap "
        "expandable_segments MODEL.megatron_arguments MODEL.megatron_arguments.*",
        FREE,
        FREE,
        "memory against time",
    ),
    _rule(
        "reward.functions.*.background reward.functions.*.timeout_seconds reward.functions.*.concurrency "
        "reward.timeout_seconds reward.num_workers reward.memory_gib reward.max_processes "
        "reward.remote.*.request_seconds reward.remote.*.retries reward.remote.*.backoff_seconds "
        "reward.remote.*.max_in_flight reward.remote.*.api_key_file",
        FREE,
        FREE,
        "when and where a function is called, and when a call is given up",
    ),
    _rule(
        "rollout.max_staleness rollout.partial rollout.partial.*",
        NOTICED,
        NOTICED,
        "how old rollouts are that are trained on; what was generated ahead is dropped",
    ),
    _rule(
        "rollout.* rollout.engine_arguments.* rollout.engine_arguments.compilation_config.*",
        FREE,
        FREE,
        "how the engine works; its weights come from the actor each time",
    ),
    _rule("device_profile", FREE, FREE, "the profile for `auto`, which each start resolves"),
    _rule("env_vars env_vars.* tensor_parallel_across_hosts", FREE, FREE, "how ranks reach each other and files"),
    _rule("checkpoint.* watchdog.*", FREE, FREE, "when a run saves and ends, not what it computes"),
    _rule("metrics.*", FREE, FREE, "which metrics are recorded, and how often; a later file lacks earlier rows"),
    _rule("metrics.wandb.* metrics.mlflow.*", FREE, FREE, "where later rows go"),
    _rule("metrics.profile.*", FREE, FREE, "which iterations are traced"),
    _rule(
        "metrics.eval_reward metrics.eval_reward.* metrics.eval_threshold",
        NOTICED,
        NOTICED,
        "eval/accuracy is not comparable with earlier values",
    ),
    # ---- the models
    _rule(
        "actor.model critic.model reward_model.model",
        FREE,
        FREE,
        "weights come from the checkpoint; config.json is compared",
    ),
    _rule(
        "reference.model",
        NOTICED,
        NOTICED,
        "the KL is measured to the weights in that directory, which no checkpoint holds",
    ),
    _rule(
        "reward.models.*.model",
        NOTICED,
        NOTICED,
        "scores come from the weights in that directory, which no checkpoint holds",
    ),
    _rule(
        "MODEL.hf_overrides MODEL.hf_overrides.*",
        REFUSED,
        NOTICED,
        "the same weights compute another model: what is recorded before and after is not comparable",
    ),
    _rule(
        "actor.dtype critic.dtype reward_model.dtype", REFUSED, REFUSED, "weights and optimizer state have that type"
    ),
    _rule("reference.dtype reward.models.*.dtype", NOTICED, NOTICED, "the model computes in this precision"),
    _rule(
        "TRAINED.lora",
        REFUSED,
        REFUSED,
        "with adapters a checkpoint holds the adapters alone, without adapters all weights",
    ),
    _rule(
        "TRAINED.lora.rank TRAINED.lora.target_modules TRAINED.lora.exclude_modules",
        REFUSED,
        REFUSED,
        "the adapters in the checkpoint have the former rank, and belong to the former linear layers",
    ),
    _rule(
        "TRAINED.lora.alpha TRAINED.lora.use_rslora",
        REFUSED,
        REFUSED,
        "the adapters were trained with the former scale: with another one they are another model",
    ),
    _rule(
        "TRAINED.lora.adapter_path",
        REFUSED,
        REFUSED,
        "the checkpoint's adapters began with those of that directory, which may be the reference as well",
    ),
    _rule("critic", REFUSED, REFUSED, "a new critic is untrained; a removed critic loses its training"),
    _rule("reference", NOTICED, NOTICED, "the reference is read from its directory, or not needed"),
    # ---- the optimizers
    _rule("TRAINED.optimizer.name", REFUSED, REFUSED, "the optimizer state belongs to that optimizer"),
    _rule(
        "TRAINED.optimizer.lr TRAINED.optimizer.min_lr TRAINED.optimizer.schedule "
        "TRAINED.optimizer.warmup_iterations TRAINED.optimizer.weight_decay TRAINED.optimizer.clip_grad",
        NOTICED,
        NOTICED,
        "",
    ),
    _rule(
        "TRAINED.optimizer.betas TRAINED.optimizer.eps TRAINED.optimizer.momentum",
        NOTICED,
        NOTICED,
        "the moments so far were made with the former value",
    ),
    _rule("num_epochs", NOTICED, NOTICED, "the key sets the length of the run and of a schedule"),
    _rule("num_iterations", NOTICED, NOTICED, "a schedule of the learning rate follows the new length"),
    # ---- the data
    _rule(
        "data.train data.train.* data.train.*.path data.train.*.hub data.train.*.name data.train.*.split "
        "data.train.*.revision data.heldout data.heldout.* data.heldout.*.path data.heldout.*.hub data.heldout.*.name "
        "data.heldout.*.split data.heldout.*.revision data.train.reasoning_gym data.train.reasoning_gym.* "
        "data.train.reasoning_gym.*.* data.train.reasoning_gym.*.config.* data.heldout.reasoning_gym "
        "data.heldout.reasoning_gym.* data.heldout.reasoning_gym.*.* data.heldout.reasoning_gym.*.config.* "
        "data.heldout.*.files data.heldout.*.files.* data.heldout.*.files.*.* data.heldout.*.files.reasoning_gym.*.* "
        "data.heldout.*.files.reasoning_gym.*.config.*",
        FREE,
        FREE,
        "the start compares contents, not paths",
    ),
    _rule(
        "data.prompt_key data.chat_template data.chat_template_kwargs data.chat_template_kwargs.* data.message_format "
        "data.assistant_turns data.shuffle data.columns data.train.*.weight "
        "data.train.reasoning_gym.*.weight seed",
        REFUSED,
        NOTICED,
        "the key decides the order of prompts: the saved place means another prompt",
    ),
    _rule(
        "data.max_prompt_length",
        REFUSED,
        NOTICED,
        "with data.overlong_prompts: drop the key decides the prompts and their order; with error the key may change",
    ),
    _rule(
        "data.bad_rows data.checked_mib",
        REFUSED,
        NOTICED,
        "the key decides which rows are in the order of prompts",
    ),
    _rule("data.heldout.*.weight", FREE, FREE, "held-out files have no weights"),
    _rule("data.heldout.*.interval", FREE, FREE, "how often the set is evaluated"),
    _rule(
        "data.heldout.*.samples data.heldout.*.temperature",
        NOTICED,
        NOTICED,
        "the set's metrics are not comparable with earlier values",
    ),
    _rule(
        "data.max_length data.overlong",
        REFUSED,
        NOTICED,
        "the keys decide which rows there are, and their order",
    ),
    _rule("data.batch_size", NOTICED, NOTICED, "the saved place counts rows: none is left out or repeated"),
    _rule(
        "data.overlong_prompts",
        FREE,
        FREE,
        "with the same prompts and lengths the same rows stay, or the start is an error",
    ),
    _rule(
        "data.prompts_per_iteration",
        NOTICED,
        NOTICED,
        "the saved place counts prompts: none is left out or repeated",
    ),
    _rule(
        "data.environment",
        REFUSED,
        NOTICED,
        "the goal changes: scores before and after are not comparable",
    ),
    _rule(
        "data.environment.*",
        NOTICED,
        NOTICED,
        "later conversations go by the new value: scores before and after may not be comparable",
    ),
    _rule(
        "data.environment.call_seconds data.environment.row_seconds data.environment.rollout_seconds "
        "data.environment.num_workers data.environment.on_error data.environment.concurrency data.environment.listen "
        "data.environment.token_file "
        "data.environment.python",
        FREE,
        FREE,
        "when and where the class or agent is called, and when a row is given up",
    ),
    _rule("sampling.*", NOTICED, NOTICED, "later responses are drawn with the new value"),
    _rule("sampling.temperature", NOTICED, NOTICED, "responses, log-probs and KL belong to another distribution"),
    _rule(
        "sampling.by_prompt_length.* sampling.by_prompt_length.*.*",
        NOTICED,
        NOTICED,
        "later responses are drawn with the new values; log-probs and KL are at the new temperature; a surplus with "
        "groups of another size is dropped",
    ),
    # ---- what is aimed at
    _rule(
        "reward reward.models.* reward.functions.* reward.functions.*.function reward.remote.*",
        REFUSED,
        NOTICED,
        "the goal changes: scores before and after are not comparable",
    ),
    _rule(
        "reward.models.*.weight reward.models.*.reencode reward.functions.*.weight reward.functions.*.arguments "
        "reward.functions.*.parts reward.functions.*.per reward.remote.*.weight reward.remote.*.url "
        "reward.remote.*.kind reward.remote.*.model reward.remote.*.template reward.remote.*.max_tokens "
        "reward.remote.*.lowest reward.remote.*.highest reward.on_error reward.error_score reward.special_tokens "
        "reward.clip_score reward.truncation_penalty reward.overlong reward.overlong.*",
        NOTICED,
        NOTICED,
        "scores before and after are not comparable; a critic has to learn the new scores",
    ),
    _rule(
        "reward.normalization",
        NOTICED,
        NOTICED,
        "running moments continue from the checkpoint's, if the checkpoint has any",
    ),
    _rule("algorithm.name algorithm.flow algorithm.roles", REFUSED, NOTICED, "the algorithm changes"),
    _rule("algorithm.options", NOTICED, NOTICED, "only the flow knows their meaning"),
    _rule(
        "algorithm.gamma algorithm.gae_lambda algorithm.value_gae_lambda algorithm.length_adaptive_alpha "
        "algorithm.whiten_advantages algorithm.positive_nll_coef algorithm.value_clip_range "
        "algorithm.critic_warmup_iterations algorithm.std algorithm.dynamic_sampling algorithm.dynamic_sampling.* "
        "algorithm.baseline algorithm.policy.* algorithm.policy.importance.* algorithm.update.*",
        NOTICED,
        NOTICED,
        "",
    ),
    _rule(
        "algorithm.policy.replay_routing",
        NOTICED,
        NOTICED,
        "log-probs before and after come from other experts; earlier responses have no record of the engine's experts",
    ),
    _rule(
        "algorithm.loss algorithm.beta algorithm.label_smoothing algorithm.desirable_weight "
        "algorithm.undesirable_weight",
        NOTICED,
        NOTICED,
        "losses before and after are not comparable",
    ),
    _rule("algorithm.kl.use algorithm.kl.estimator algorithm.kl.controller", NOTICED, NOTICED, ""),
    _rule(
        "algorithm.kl.reset_reference_interval",
        NOTICED,
        NOTICED,
        "with the key a checkpoint holds the reference; without the key the reference is read from its directory",
    ),
    _rule(
        "algorithm.kl.coef algorithm.kl.target algorithm.kl.horizon",
        NOTICED,
        NOTICED,
        "an adaptive controller continues from its saved coefficient",
    ),
    _rule("nonfinite.*", NOTICED, NOTICED, ""),
    _rule("stop_when stop_when.*", FREE, FREE, "when a run ends, not what it computes"),
)


# of `data.digests.run_digests`; the config's differences report what one side lacks
CONTENTS: tuple[ChangeRule, ...] = (
    _rule("data.train", REFUSED, NOTICED, "the saved place in the order of prompts means another prompt"),
    _rule("data.heldout data.heldout.*", NOTICED, NOTICED, "eval/accuracy is not comparable with earlier values"),
    ChangeRule(
        ("the tokenizer of actor.model", "the tokenizer of reward_model.model"),
        REFUSED,
        NOTICED,
        "token ids must mean the tokens that the actor was trained on",
    ),
    ChangeRule(
        ("config.json of actor.model", "config.json of critic.model", "config.json of reward_model.model"),
        REFUSED,
        REFUSED,
        "the checkpoint's weights have that architecture",
    ),
    ChangeRule(
        (*(f"{WEIGHTS_OF}{name}.model" for name in ("actor", "critic", "reward_model")), "the adapters of *"),
        REFUSED,
        REFUSED,
        "a checkpoint holds adapters alone, which belong to the weights that they were trained beside",
    ),
    ChangeRule(
        ("config.json of reference.model", "config.json of reward.models.*.model"),
        REFUSED,
        NOTICED,
        "the model changes: KL or scores before and after are not comparable",
    ),
    ChangeRule(
        (f"{WEIGHTS_OF}*",),
        NOTICED,
        NOTICED,
        "the directory has other weights than before: KL or scores before and after are not comparable",
    ),
    ChangeRule(
        ("the file of *", "hybridflow's code", "the version of *"),
        NOTICED,
        NOTICED,
        "bit for bit the same only with the same code and versions",
    ),
)


UNKNOWN = ChangeRule((), NOTICED, NOTICED, "this version does not know it")
