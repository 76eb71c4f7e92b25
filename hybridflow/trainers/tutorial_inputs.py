"""What `hybridflow.trainers.tutorial_names` was given, as an experiment config.

asked = TrainerArguments(actor_model="models/policy", reward_model=my_rewards.score, algo="grpo", ...)
config = asked.experiment(num_iterations=1000, run_dir=Path("runs/mine"))
with models_on_disk(asked.in_memory(config), tokenizer, config):    # models in memory are directories within the block
    ...

    check_model("actor_model", model)            # a directory or an object of a family that is known here
    function_name(my_rewards.score)              # "my_rewards:score"
"""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.architecture.spec import ARCHITECTURES, read_spec
from hybridflow.config import AlgorithmConfig, ExperimentConfig, RoleConfig, TrainedRoleConfig, set_key
from hybridflow.errors import CheckpointError, ConfigError, UserCodeError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.agreement import failures
from hybridflow.user_code import load_function

Model = str | Path | PreTrainedModel  # a HuggingFace directory, or a model in memory
Reward = Model | Callable[..., Any]
Tokenizer = str | Path | PreTrainedTokenizerBase


def check_model(name: str, model: object) -> None:
    """Errors: ConfigError, CheckpointError unless it is a directory or an object of a family that we know."""
    if isinstance(model, str | Path):
        try:
            read_spec(model)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        return
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{name}: is of type {type(model).__name__}; a model is a HuggingFace directory or a transformers model"
        )
    kind = type(model).__name__
    if kind not in ARCHITECTURES:
        raise ConfigError(f"{name}: {kind} is not supported; known are {', '.join(ARCHITECTURES)}")


def function_name(function: object) -> str:
    """`module:function`, by which every rank, and who reads the run's config later, finds it again.

    Errors: ConfigError for what has no such name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    rule = "a config names a reward function as module:function, and every rank imports it: "
    if not callable(function) or not module:
        raise ConfigError(f"reward_model: {function!r} is neither a model nor a function")
    if module == "__main__":
        raise ConfigError(f"reward_model: {name} is defined in the program itself; {rule}move it to a file of its own")
    if not name.isidentifier():
        raise ConfigError(f"reward_model: {name} of {module} has no name of its own; {rule}make it a def of the module")
    path = f"{module}:{name}"
    try:
        found = load_function(path, "reward_model")
    except UserCodeError as error:
        raise ConfigError(str(error)) from error
    if found is not function:
        raise ConfigError(f"reward_model: {path} is another object than the one given; {rule}give that one")
    return path


def loaded_tokenizer(name: str, tokenizer: object) -> PreTrainedTokenizerBase:
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, str | Path):
        raise ConfigError(f"{name}: is of type {type(tokenizer).__name__}; expected a tokenizer of transformers")
    try:
        return AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} = {tokenizer}: has no tokenizer that transformers can load: {error}") from error


def differ(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether they know other tokens, end otherwise, or render conversations otherwise."""
    first, second = ((x.get_vocab(), x.eos_token_id, x.chat_template) for x in (one, other))
    return first != second


# ------------------------------------------------------------------------------------------------ models in memory


@contextlib.contextmanager
def models_on_disk(
    models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase | None, config: ExperimentConfig
) -> Iterator[None]:
    """Within the block each model is in a directory that all ranks see; the actor's directory has the tokenizer, too.

    The first rank writes; the models of the others do not count. Collective over the world where there are any.
    Errors: CheckpointError, on every rank.
    """
    if not models:
        yield
        return
    deadlines = config.watchdog.deadlines().values()
    platform = platforms.start(config.seed, config.platform, longest_phase_seconds=max(deadlines))
    root = config.run_dir.with_name(f".{config.name}.models")
    try:
        _together(lambda: _write(models, tokenizer, Path(config.actor.model), root) if platform.rank == 0 else None)
        _together(lambda: _check_seen(models, config))
        yield
    finally:
        if platform.rank == 0:
            shutil.rmtree(root, ignore_errors=True)


def _write(
    models: Mapping[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase | None, actor: Path, root: Path
) -> None:
    shutil.rmtree(root, ignore_errors=True)  # of a start that was killed
    for directory, model in models.items():
        try:
            model.save_pretrained(directory)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # a full disk, weights on no device
            raise CheckpointError(f"{directory}: the model in memory cannot be written: {error}") from error
    if tokenizer is not None:
        tokenizer.save_pretrained(actor)


def _check_seen(models: Mapping[str, PreTrainedModel], config: ExperimentConfig) -> None:
    for directory in models:
        if not (Path(directory) / "config.json").exists():
            raise CheckpointError(
                f"output_dir = {config.output_dir!r}: {directory} is not there, though rank 0 wrote it: models in "
                f"memory need a directory that all hosts share"
            )


def _together(act: Callable[[], None]) -> None:
    """Do it here; where it fails on any rank it fails on all."""
    failure = None
    try:
        act()
    except (OSError, CheckpointError) as error:
        failure = str(error)
    found = failures(failure, platforms.world_group())
    if found:
        raise CheckpointError("; ".join(found))


Tree = dict[str, Any]

SHORT: Mapping[str, tuple[str, ...]] = {  # names for `config` -> the keys that they stand for
    "batch_size": ("data.prompts_per_iteration",),
    "mini_batch_size": ("algorithm.update.mini_batch_size",),
    "epochs": ("algorithm.update.epochs",),  # passes over the batch of an iteration
    "rollout_len": ("sampling.max_response_length",),
    "samples_per_prompt": ("sampling.samples_per_prompt",),
    "temperature": ("sampling.temperature",),
    "lr": ("actor.optimizer.lr", "critic.optimizer.lr"),
    "kl_coef": ("algorithm.kl.coef",),
    "clip_range": ("algorithm.policy.clip_range",),
}
OF_EACH_MODEL = TrainedRoleConfig.model_fields.keys() - {"model", "optimizer", "ranks"}  # as get_trainer_config gives


@dataclass(frozen=True)
class TrainerArguments:
    """The arguments of `RLTrainer`, checked."""

    actor_model: Model
    critic_model: Model | None
    reference_model: Model | None  # None: the actor as it begins, where the algorithm has a reference
    reward_model: Reward | Sequence[Reward] | None
    tokenizer: Tokenizer | None
    algo: str
    data: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("actor_model", "critic_model", "reference_model"):
            if getattr(self, name) is not None:
                check_model(name, getattr(self, name))
        self._check_roles()
        self.tokenizer_to_write()

    def experiment(
        self, num_iterations: int, run_dir: Path | None, more: Mapping[str, Any] | None = None
    ) -> ExperimentConfig:
        """The config. run_dir: None where the config says, by default runs/ALGO; more: keys of it that win."""
        tree = self._given()
        tree["num_iterations"] = num_iterations
        if run_dir is not None:
            tree |= {"output_dir": str(run_dir.parent), "name": run_dir.name}
        for key, value in (more or {}).items():
            set_key(tree, key.split("."), value, "RLTrainer")
        self._add_models(tree)
        for name, value in self.config.items():
            for key in SHORT.get(name, ()):
                section, *path = key.split(".")
                if section in tree:  # there may be no critic
                    _set_default(tree[section], path, value)
        return ExperimentConfig.from_tree(tree, "RLTrainer")

    def says(self, key: str) -> bool:
        """Whether the user's config names this key, such as checkpoint.save_interval."""
        node: Any = self._given()
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True

    def in_memory(self, config: ExperimentConfig) -> dict[str, PreTrainedModel]:
        """Those models that are to be written, by the directory that the config names."""
        models = {"actor": self.actor_model, "critic": self.critic_model, "reference": self._reference()}
        rewards = {f"reward.models.{i}": model for i, model in enumerate(self._rewards()[0])}
        found = {name: (models | rewards)[name] for name in config.roles()}
        return {config.roles()[name].model: x for name, x in found.items() if isinstance(x, PreTrainedModel)}

    def tokenizer_to_write(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer to write; None where the actor's directory has one. Errors: ConfigError, CheckpointError."""
        given = None if self.tokenizer is None else loaded_tokenizer("tokenizer", self.tokenizer)
        if isinstance(self.actor_model, PreTrainedModel):
            if given is None:
                raise ConfigError("tokenizer: is required where actor_model is in memory: an object, or a directory")
            return given
        if given is not None and differ(given, loaded_tokenizer("actor_model", self.actor_model)):
            raise ConfigError(
                f"tokenizer: is not the one in actor_model = {self.actor_model}, which a run reads: save yours there "
                f"with save_pretrained, or give the actor in memory"
            )
        return None

    # ---- inside

    def _given(self) -> Tree:
        """A config without models: what the user says of the rest, in full."""
        algo = str(self.algo).lower()
        tree: Tree = {"name": algo, "data": dict(self.data), "sampling": {}, "algorithm": {"name": algo}}
        for key, value in self.config.items():
            if "." in key:
                set_key(tree, key.split("."), value, "RLTrainer")
            elif key not in SHORT and key not in OF_EACH_MODEL:
                _merge(tree, {key: value})
        for key in ("actor.model", "critic.model", "reference.model"):
            _refuse_if_there(tree, key, key.replace(".", "_"))
        for key in ("reward.models.*.model", "reward.functions.*.function"):
            _refuse_if_there(tree, key, "reward_model")
        return tree

    def _needs(self, tree: Tree) -> frozenset[str]:
        """Roles of the algorithm; none where it does not hold, which validating the whole will tell."""
        with contextlib.suppress(ValidationError):
            algorithm: AlgorithmConfig = TypeAdapter(AlgorithmConfig).validate_python(tree["algorithm"])
            return algorithm.needs()
        return frozenset()

    def _check_roles(self) -> None:
        needs = self._needs(self._given())
        how = {"critic": "critic_model=create_critic_model(actor_model)", "reward": "reward_model=..."}
        for role, given in (("critic", self.critic_model), ("reward", self.reward_model)):
            if role in needs and given is None:
                raise ConfigError(f"{role}_model: is required by algo = {self.algo!r}: {how[role]}")
            if needs and role not in needs and given is not None:
                raise ConfigError(f"{role}_model: algo = {self.algo!r} has none: leave it out")

    def _reference(self) -> Model:
        return self.actor_model if self.reference_model is None else self.reference_model

    def _rewards(self) -> tuple[list[Model], list[str]]:
        """Reward models, and the names of reward functions."""
        given = self.reward_model
        every = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        models: list[Model] = []
        functions: list[str] = []
        for one in every:
            if isinstance(one, str) and ":" in one:
                functions.append(one)
            elif isinstance(one, str | Path | PreTrainedModel):
                check_model("reward_model", one)
                models.append(one)
            else:
                functions.append(function_name(one))
        return models, functions

    def _add_models(self, tree: Tree) -> None:
        """The sections of the roles, with what the user says of each model."""
        root = Path(str(tree.get("output_dir", "runs"))) / f".{tree['name']}.models"
        places: dict[int, str] = {}  # one directory where two roles begin with one model

        def directory(role: str, model: Model) -> str:
            if not isinstance(model, PreTrainedModel):
                return str(model)
            return places.setdefault(id(model), str(root / role))

        models, functions = self._rewards()
        sections = {"actor": self.actor_model}
        if self.critic_model is not None:
            sections["critic"] = self.critic_model
        if self.reference_model is not None or "reference" in self._needs(tree):
            sections["reference"] = self._reference()
        for role, model in sections.items():
            _set_default(tree, [role, "model"], directory(role, model))
        for i, model in enumerate(models):
            _set_default(tree, ["reward", "models", str(i), "model"], directory(f"reward_{i}", model))
        for i, name in enumerate(functions):
            _set_default(tree, ["reward", "functions", str(i), "function"], name)
        for key in self.config:
            if key in OF_EACH_MODEL:
                self._set_of_each(tree, key, [*sections], len(models))

    def _set_of_each(self, tree: Tree, key: str, roles: Sequence[str], num_reward_models: int) -> None:
        paths = [[role, key] for role in roles if role in ("actor", "critic") or key in RoleConfig.model_fields]
        if key in RoleConfig.model_fields:
            paths += [["reward", "models", str(i), key] for i in range(num_reward_models)]
        for path in paths:
            _set_default(tree, path, self.config[key])


def _refuse_if_there(tree: Any, key: str, argument: str) -> None:
    """Errors: ConfigError where the user's config names what is an argument."""
    found: list[Any] = [tree]
    for part in key.split("."):
        if part == "*":
            found = [item for node in found if isinstance(node, list | tuple) for item in node]
        else:
            found = [node[part] for node in found if isinstance(node, dict) and part in node]
    if found:
        raise ConfigError(f"RLTrainer: config: {key.replace('*', '0')} = {found[0]!r}: the argument {argument} says it")


def _merge(tree: Tree, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _set_default(tree: Any, path: Sequence[str], value: Any) -> None:
    """Set the value where the tree has none. A wrong value in the way is reported by the later validation."""
    for key, following in itertools.pairwise(path):
        if isinstance(tree, list) and int(key) == len(tree):
            tree.append({})
        if not isinstance(tree, dict | list):
            return
        empty: Any = [] if following == "0" else {}
        tree = tree[int(key)] if isinstance(tree, list) else tree.setdefault(key, empty)
    if isinstance(tree, dict):
        tree.setdefault(path[-1], value)
