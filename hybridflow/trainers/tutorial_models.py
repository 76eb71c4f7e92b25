"""Models, tokenizers and functions that `tutorial_names` gets as Python objects, as what a config can name.

check_model("actor_model", model)            # a directory or an object of a family that we know
function_name(my_rewards.score)              # "my_rewards:score"
with models_on_disk({"runs/.mine.models/actor": model}, tokenizer, config):
    ...                                      # it is that directory, on all ranks
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.architecture.spec import ARCHITECTURES, read_spec
from hybridflow.config import ExperimentConfig
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
