"""The names that tutorials of HybridFlow systems use, for the config and the trainer that are there.

    from hybridflow import RLTrainer, create_critic_model, get_trainer_config, make_rl_data_loader

    trainer = RLTrainer(
        actor_model="models/policy",
        critic_model=create_critic_model("models/policy"),
        reward_model="models/reward",                       # or a function: my_rewards.score
        tokenizer=AutoTokenizer.from_pretrained("models/policy"),
        algo="ppo",
        data_loader=make_rl_data_loader("data.jsonl"),
        config=get_trainer_config(tp_size=2, pp_size=2, enable_recompute=True, mixed_precision="bf16")
        | {"batch_size": 128, "rollout_len": 64, "lr": 1e-5, "epochs": 1, "rollout.kv_cache_gib": 8},
    )
    trainer.fit(num_steps=1000, checkpoint_dir="runs/mine")

is started by torchrun, once a rank. Each argument becomes keys of an ExperimentConfig (`trainer.config`); whatever
else that has is named in `config` by the key's path. The run leaves a config.yaml with all keys.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from hybridflow.checkpoint.store import CHECKPOINTS, MANIFEST, steps
from hybridflow.config import ExperimentConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.other_trainers import hint
from hybridflow.errors import ConfigError
from hybridflow.flows.generation import Source
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.recording.recorder import RunSummary
from hybridflow.trainers.online import OnlineTrainer
from hybridflow.trainers.tutorial_inputs import Model, Reward, Tokenizer, TrainerArguments, check_model, models_on_disk
from hybridflow.user_code import search_beside

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "no": "float32", "fp32": "float32", "float32": "float32"}
MAX_PROMPT_LENGTH = 512  # tokens; a longer prompt is an error that names the key
SAVES = 10  # checkpoints of a run, where nothing else is said


def get_trainer_config(
    dp_size: int | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    enable_recompute: bool = False,
    mixed_precision: str = "bf16",
    **others: object,
) -> dict[str, Any]:
    """How every model of a run is laid out: keys for `config` of `RLTrainer`, those of a role's section.

    dp_size: None is what is left of the ranks; else dp_size x tp_size x pp_size has to be their number.
    enable_recompute: activations of actor and critic are computed again in the backward pass.
    mixed_precision: bf16, with float32 main weights in the optimizer, or no. Errors: ConfigError.
    """
    _refuse("get_trainer_config", others, "dp_size, tp_size, pp_size, enable_recompute, mixed_precision")
    if mixed_precision not in DTYPES:
        raise ConfigError(f"mixed_precision = {mixed_precision!r}: bf16, or no for float32; there is no float16 here")
    layout = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    if dp_size is not None:
        layout["data_parallel_size"] = dp_size
    return {**layout, "recompute": "full" if enable_recompute else "none", "dtype": DTYPES[mixed_precision]}


def create_critic_model(model: Model) -> Model:
    """The critic that begins with the weights of `model`, for `critic_model` of `RLTrainer`.

    `model` is a causal language model, whose critic gets a value head of zeros (V = 0), or a model with one label,
    whose head the critic keeps. The model is returned unchanged: the trainer reads the weights into a new critic.
    Errors: ConfigError, CheckpointError where it can be no critic.
    """
    check_model("create_critic_model", model)
    return model


def make_rl_data_loader(
    path: str | Path, *, max_prompt_length: int = MAX_PROMPT_LENGTH, heldout: str | Path | None = None, **more: Any
) -> dict[str, Any]:
    """The prompts of a JSON-lines file, for `data_loader` of `RLTrainer`: the config's section `data`.

    more: other keys of it, such as prompt_key, chat_template, overlong_prompts, shuffle, or batch_size, which is
    prompts_per_iteration. The file is read when training starts, by every rank. Errors: ConfigError for an unknown key.
    """
    section = {"train": str(path), "max_prompt_length": max_prompt_length}
    if heldout is not None:
        section["heldout"] = str(heldout)
    if "batch_size" in more:
        more["prompts_per_iteration"] = more.pop("batch_size")
    known = ", ".join(["batch_size", *DataConfig.model_fields])
    unknown = {key: value for key, value in more.items() if key not in DataConfig.model_fields}
    _refuse("make_rl_data_loader", unknown, known)
    return section | more


class RLTrainer(OnlineTrainer):
    """The trainer, of a config or of models.

    Of a config it is `trainers.online.OnlineTrainer`. Of models, nothing is loaded before `fit`, which builds that from
    the config that they make.

    actor_model, critic_model, reference_model: a HuggingFace directory, or a model of transformers. One in memory is
        written once, by the first rank, beside the run directory, and removed when the run is over.
    reference_model: None is the actor as it begins, where the algorithm has a reference.
    reward_model: a directory or a model with one label; a function, or the name module:function; or several.
    tokenizer: that of the actor, needed where the actor is in memory.
    algo: an `algorithm.name`.
    data_loader: a JSON-lines file, or what `make_rl_data_loader` gives.
    config: short names (batch_size: prompts an iteration, mini_batch_size: sequences, epochs: passes over an
        iteration's batch, rollout_len: tokens of a response, samples_per_prompt, temperature, lr: of actor and critic,
        kl_coef, clip_range), keys of every model, and any key of the config by path ("rollout.kv_cache_gib").

    Errors: ConfigError, CheckpointError naming the argument or key, the value and the rule.
    """

    @overload
    def __init__(
        self,
        config: ExperimentConfig,
        watchdog: Watchdog | None = None,
        *,
        replay: Path | None = None,
        rollout_only: bool = False,
        source: Callable[[OnlineTrainer], Source] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        actor_model: Model,
        critic_model: Model | None = None,
        reference_model: Model | None = None,
        reward_model: Reward | Sequence[Reward] | None = None,
        tokenizer: Tokenizer | None = None,
        algo: str = "ppo",
        data_loader: str | Path | Mapping[str, Any],
        config: Mapping[str, Any],
        hybrid_engine: bool = True,
    ) -> None: ...

    def __init__(
        self,
        config: ExperimentConfig | Mapping[str, Any] | None = None,
        watchdog: Watchdog | None = None,
        *,
        replay: Path | None = None,
        rollout_only: bool = False,
        source: Callable[[OnlineTrainer], Source] | None = None,
        **given: Any,
    ) -> None:
        self._asked: TrainerArguments | None = None
        self._load: Path | None = None
        self._was_fitted = False
        if isinstance(config, ExperimentConfig):
            if given:
                raise ConfigError(f"RLTrainer: a config names its models, leave out {', '.join(given)}")
            super().__init__(config, watchdog, replay=replay, rollout_only=rollout_only, source=source)
            return
        if watchdog is not None or replay is not None or rollout_only or source is not None:
            raise ConfigError("RLTrainer: watchdog, replay, rollout_only and source go with an ExperimentConfig")
        search_beside(sys.argv[0] or "-")  # functions by name: in the working directory, and beside the program
        self._asked = _asked(config, given)
        self.config = self._asked.experiment(self._asked.config.get("num_iterations", 1), None)

    def load_checkpoint(self, path: str | Path) -> None:
        """Have `fit` go on from a checkpoint, or from the newest of a run directory. Errors: ConfigError."""
        if self._asked is None or self._was_fitted:
            why = "its training is over" if self._asked else "it was built from a config, whose checkpoint.load says"
            raise ConfigError(f"load_checkpoint({str(path)!r}): comes before fit, and {why}")
        path = Path(path)
        if not ((path / MANIFEST).exists() or steps(path / CHECKPOINTS) or steps(path)):
            raise ConfigError(
                f"load_checkpoint({str(path)!r}): is no checkpoint, which has a {MANIFEST}, and holds none; a "
                f"HuggingFace directory is an actor_model"
            )
        self._load = path

    def fit(
        self,
        num_iterations: int | None = None,
        *,
        num_steps: int | None = None,
        checkpoint_dir: str | Path | None = None,
    ) -> RunSummary:
        """Train for `num_steps` iterations, another name of `num_iterations`, and write the run directory.

        checkpoint_dir: of a trainer of models, the run directory. A run that is given one saves ten times, or every
        `checkpoint.save_interval`, and the same program goes on where it ended. None: `output_dir`/`name` of the
        config, without checkpoints. Errors: as `hybridflow.trainers.online.OnlineTrainer.fit`.
        """
        if num_iterations is not None and num_steps is not None:
            raise ConfigError(f"fit: num_iterations = {num_iterations} and num_steps = {num_steps} are one: give one")
        num = num_iterations if num_steps is None else num_steps
        if self._asked is None:
            if checkpoint_dir is not None:
                raise ConfigError(f"checkpoint_dir = {str(checkpoint_dir)!r}: set output_dir and name in the config")
            return super().fit(num)
        if self._was_fitted:
            raise ConfigError("fit: was called before; one call trains for all of num_steps")
        return self._fit_models(self._asked, num, None if checkpoint_dir is None else Path(checkpoint_dir))

    def _fit_models(self, asked: TrainerArguments, num: int | None, run_dir: Path | None) -> RunSummary:
        if num is None and not asked.says("num_iterations"):
            raise ConfigError("fit: num_steps is required")
        num = self.config.num_iterations if num is None else num
        if num < 1:
            raise ConfigError(f"num_steps = {num}: a run has at least one iteration")
        config = self._experiment(asked, num, run_dir)
        self._was_fitted = True
        with models_on_disk(asked.in_memory(config), asked.tokenizer_to_write(), config):
            super().__init__(config)
            return super().fit(num)

    def _experiment(self, asked: TrainerArguments, num: int, run_dir: Path | None) -> ExperimentConfig:
        """Of so many iterations in this run directory."""
        more: dict[str, Any] = {}
        if run_dir is not None and not asked.says("checkpoint.save_interval"):
            more["checkpoint.save_interval"] = max(1, num // SAVES)
        config = asked.experiment(num, run_dir, more)
        if self._load is None:
            return config
        return asked.experiment(num, run_dir, more | {"checkpoint.load": _load_of(self._load, config.run_dir)})


def _asked(config: object, given: dict[str, Any]) -> TrainerArguments:
    """The arguments, with those left out. Errors: ConfigError for what is missing, unknown, or means nothing here."""
    known = "actor_model critic_model reference_model reward_model tokenizer algo data_loader config".split()
    if given.pop("hybrid_engine", True) is not True:
        raise ConfigError(
            "hybrid_engine: there is no other engine: vLLM generates in the trainer's processes, from the actor's own "
            "weights; rollout.ranks in config gives it ranks of its own"
        )
    _refuse("RLTrainer", {key: value for key, value in given.items() if key not in known}, ", ".join(known))
    for key in ("actor_model", "data_loader"):
        if given.get(key) is None:
            raise ConfigError(f"RLTrainer: {key} is required, or an ExperimentConfig")
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config: is of type {type(config).__name__}; expected a mapping such as {{'batch_size': 128, ...}}, or "
            f"without models an ExperimentConfig"
        )
    loader = given["data_loader"]
    if not isinstance(loader, str | Path | Mapping):
        raise ConfigError(
            f"data_loader: is of type {type(loader).__name__}; every rank reads the file: "
            "make_rl_data_loader('data.jsonl')"
        )
    return TrainerArguments(
        actor_model=given["actor_model"],
        critic_model=given.get("critic_model"),
        reference_model=given.get("reference_model"),
        reward_model=given.get("reward_model"),
        tokenizer=given.get("tokenizer"),
        algo=given.get("algo", "ppo"),
        data=loader if isinstance(loader, Mapping) else make_rl_data_loader(loader),
        config=config,
    )


def _load_of(path: Path, run_dir: Path) -> str:
    """`checkpoint.load`: the run's own directory is where it goes on by itself."""
    own = (run_dir.resolve(), (run_dir / CHECKPOINTS).resolve())
    return "auto" if path.resolve() in own else str(path)


def _refuse(what: str, unknown: Mapping[str, object], known: str) -> None:
    lines = [f"{what}: {key}: unknown argument; {hint((key,)) or f'known are {known}'}" for key in unknown]
    if lines:
        raise ConfigError("\n".join(lines))
