"""What a change of a config key, or of what a run is made of, means for a run that goes on or forks: a table."""

from dataclasses import dataclass
from enum import Enum


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
        "MODEL.sequence_parallel MODEL.ranks MODEL.micro_batch_tokens",
        FREE,
        FREE,
        "the same mathematics, summed in another order: equal up to rounding",
    ),
    _rule(
        "TRAINED.recompute TRAINED.offload_optimizer TRAINED.offload_gradients TRAINED.optimizer.zero1",
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
    _rule("rollout.*", FREE, FREE, "how the engine works; its weights come from the actor each time"),
    _rule("device_profile", FREE, FREE, "what `auto` goes by, which is resolved at each start"),
    _rule("env_vars env_vars.* tensor_parallel_across_hosts", FREE, FREE, "how ranks reach each other, and files"),
    _rule("checkpoint.* watchdog.*", FREE, FREE, "when a run saves and ends, not what it computes"),
    _rule("metrics.*", FREE, FREE, "what is recorded and how often; a file that begins later lacks what was before"),
    _rule("metrics.wandb.* metrics.mlflow.*", FREE, FREE, "where the rows go, from the next one on"),
    _rule(
        "metrics.eval_reward metrics.eval_reward.*",
        NOTICED,
        NOTICED,
        "eval/accuracy is not comparable with that before",
    ),
    # ---- the models
    _rule(
        "actor.model critic.model reward_model.model",
        FREE,
        FREE,
        "weights come from the checkpoint; config.json is compared",
    ),
    _rule("reference.model", NOTICED, NOTICED, "the KL is to the weights found there, which no checkpoint holds"),
    _rule(
        "reward.models.*.model", NOTICED, NOTICED, "scores are of the weights found there, which no checkpoint holds"
    ),
    _rule(
        "actor.dtype critic.dtype reward_model.dtype", REFUSED, REFUSED, "weights and optimizer state are of that type"
    ),
    _rule("reference.dtype reward.models.*.dtype", NOTICED, NOTICED, "it computes in that precision"),
    _rule("critic", REFUSED, REFUSED, "a critic that was not trained so far, or whose training is lost"),
    _rule("reference", NOTICED, NOTICED, "it is read from its directory, or no longer needed"),
    # ---- the optimizers
    _rule("TRAINED.optimizer.name", REFUSED, REFUSED, "the optimizer state is of that optimizer"),
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
    _rule("num_epochs", NOTICED, NOTICED, "the length of the run follows from it, and with it a schedule"),
    _rule("num_iterations", NOTICED, NOTICED, "where the learning rate has a schedule, it is that of the new length"),
    # ---- the data
    _rule(
        "data.train data.train.* data.train.*.path data.train.*.hub data.train.*.name data.train.*.split "
        "data.train.*.revision data.heldout data.heldout.* data.heldout.*.path data.heldout.*.hub data.heldout.*.name "
        "data.heldout.*.split data.heldout.*.revision",
        FREE,
        FREE,
        "the content is compared, not where it lies",
    ),
    _rule(
        "data.prompt_key data.chat_template data.chat_template_kwargs data.chat_template_kwargs.* data.message_format "
        "data.assistant_turns data.shuffle data.columns data.train.*.weight seed",
        REFUSED,
        NOTICED,
        "which prompts come next follows from it: the place reached in their order means something else",
    ),
    _rule(
        "data.max_prompt_length",
        REFUSED,
        NOTICED,
        "where data.overlong_prompts is drop it decides which prompts there are, and so their order; "
        "where it is error it may change",
    ),
    _rule(
        "data.bad_rows data.checked_mib",
        REFUSED,
        NOTICED,
        "it decides which rows have a place in the order of prompts",
    ),
    _rule("data.heldout.*.weight", FREE, FREE, "none has any"),
    _rule(
        "data.max_length data.overlong",
        REFUSED,
        NOTICED,
        "they decide which rows there are, and so their order",
    ),
    _rule("data.batch_size", NOTICED, NOTICED, "the place in their order counts rows: none is left out or repeated"),
    _rule("data.overlong_prompts", FREE, FREE, "of the same prompts and lengths it drops none, or is an error"),
    _rule(
        "data.prompts_per_iteration",
        NOTICED,
        NOTICED,
        "the place in their order counts prompts: none is left out or repeated",
    ),
    _rule("sampling.*", NOTICED, NOTICED, "responses are drawn so"),
    _rule("sampling.temperature", NOTICED, NOTICED, "responses, log-probs and KL are of another distribution"),
    _rule(
        "sampling.by_prompt_length.* sampling.by_prompt_length.*.*",
        NOTICED,
        NOTICED,
        "responses are drawn so; log-probs and KL are at the temperature that holds now; a surplus with "
        "groups of another size is dropped",
    ),
    # ---- what is aimed at
    _rule(
        "reward reward.models.* reward.functions.* reward.functions.*.function reward.remote.*",
        REFUSED,
        NOTICED,
        "it is another aim: scores before and after are not comparable",
    ),
    _rule(
        "reward.models.*.weight reward.models.*.reencode reward.functions.*.weight reward.functions.*.arguments "
        "reward.functions.*.parts reward.functions.*.per reward.remote.*.weight reward.remote.*.url "
        "reward.remote.*.kind reward.remote.*.model reward.remote.*.template reward.remote.*.max_tokens "
        "reward.remote.*.lowest reward.remote.*.highest reward.on_error reward.error_score reward.special_tokens "
        "reward.clip_score reward.truncation_penalty reward.overlong reward.overlong.*",
        NOTICED,
        NOTICED,
        "scores before and after are not comparable; a critic has to learn the new ones",
    ),
    _rule(
        "reward.normalization", NOTICED, NOTICED, "running moments go on from those of the checkpoint, if it has any"
    ),
    _rule("algorithm.name algorithm.flow algorithm.roles", REFUSED, NOTICED, "it is another algorithm"),
    _rule("algorithm.options", NOTICED, NOTICED, "the flow alone knows what they mean"),
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
        "log-probs are of other experts now and then; responses of before have no record of the engine's",
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
        "only while it is given does a checkpoint hold the reference; else it is read from its directory",
    ),
    _rule(
        "algorithm.kl.coef algorithm.kl.target algorithm.kl.horizon",
        NOTICED,
        NOTICED,
        "an adaptive controller goes on from the coefficient it has reached",
    ),
    _rule("nonfinite.*", NOTICED, NOTICED, ""),
    _rule("stop_when stop_when.*", FREE, FREE, "when a run ends, not what it computes"),
)


# of `data.digests.run_digests`; what one side lacks is told by the config
CONTENTS: tuple[ChangeRule, ...] = (
    _rule("data.train", REFUSED, NOTICED, "the place reached in the order of prompts means something else"),
    _rule("data.heldout", NOTICED, NOTICED, "eval/accuracy is not comparable with that before"),
    ChangeRule(
        ("the tokenizer of actor.model", "the tokenizer of reward_model.model"),
        REFUSED,
        NOTICED,
        "token ids have to mean what the actor was trained on",
    ),
    ChangeRule(
        ("config.json of actor.model", "config.json of critic.model", "config.json of reward_model.model"),
        REFUSED,
        REFUSED,
        "the weights of the checkpoint are of that architecture",
    ),
    ChangeRule(
        ("config.json of reference.model", "config.json of reward.models.*.model"),
        REFUSED,
        NOTICED,
        "it is another model: KL or scores before and after are not comparable",
    ),
    ChangeRule(
        ("the file of *", "hybridflow's code", "the version of *"),
        NOTICED,
        NOTICED,
        "bit for bit the same only with the same code and versions",
    ),
)


UNKNOWN = ChangeRule((), NOTICED, NOTICED, "this version does not know it")
