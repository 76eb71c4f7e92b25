"""Everything a run reads besides weights: tokenizer, prompts, held-out prompts and what counts as right."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridflow.config import DataConfig, ExperimentConfig, RoleConfig
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.reshard.groups import check_rollout, rollout_of
from hybridflow.rewards.functions import RewardFunction, load_reward_function


@dataclass(frozen=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    train: PromptDataset
    heldout: PromptDataset | None
    right: RewardFunction | None  # 1.0 where a held-out response is right

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def left_out(self) -> list[str]:
        """What the user should know of prompts that data.overlong_prompts = drop took away: a line a file."""
        return [
            f"{key}: left out {prompts.num_dropped} of {len(prompts) + prompts.num_dropped} prompts longer than "
            f"data.max_prompt_length"
            for key, prompts in (("data.train", self.train), ("data.heldout", self.heldout))
            if prompts is not None and prompts.num_dropped
        ]


def load_inputs(config: ExperimentConfig, world_size: int) -> Inputs:
    """Read and check all of it, and that every model fits its role's layout and the longest sequence.

    The config must have passed `check_world_size`.
    Errors: DataError, CheckpointError, ConfigError, RewardError naming file, field and rule.
    """
    _check_models(config, world_size)
    path, data = Path(config.actor.model), config.data
    tokenizer = _load_tokenizer(path)
    return Inputs(
        tokenizer=tokenizer,
        eos_token_ids=_end_tokens(path, tokenizer),
        train=_prompts(data.train, tokenizer, data),
        heldout=_prompts(data.heldout, tokenizer, data) if data.heldout else None,
        right=load_reward_function(config.metrics.eval_reward) if config.metrics.eval_reward else None,
    )


def _check_models(config: ExperimentConfig, world_size: int) -> None:
    actor = read_spec(config.actor.model)
    for name, role in config.roles().items():
        spec = read_spec(role.model)
        spec.check_parallel(f"{name}.tensor_parallel_size", role.tensor_parallel_size)
        _check_layers(name, role, spec, world_size)
        spec.check_length(config.max_sequence_length)
        spec.check_vocabulary(name, actor)
    check_rollout(actor, config.rollout_tensor_parallel_size)
    rollout_of(config, actor.num_layers, world_size)


def _check_layers(name: str, role: RoleConfig, spec: ModelSpec, world_size: int) -> None:
    """Raise ConfigError unless the layers go up in the role's pipeline stages and model chunks."""
    keys = [
        *["pipeline_parallel_size", "virtual_pipeline_parallel_size"],
        *["num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"],
    ]
    given = [f"{name}.{key} = {getattr(role, key)}" for key in keys if key in role.model_fields_set]
    try:
        role.layout(world_size).chunks(spec.num_layers)
    except ValueError as error:
        raise ConfigError(
            f"{', '.join(given)} and num_hidden_layers = {spec.num_layers} of {spec.path}: {error}"
        ) from error


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: has no tokenizer that transformers can load: {error}") from error


def _prompts(path: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PromptDataset:
    return load_prompts(
        path,
        tokenizer,
        prompt_key=data.prompt_key,
        chat_template=data.chat_template,
        max_length=data.max_prompt_length,
        overlong=data.overlong_prompts,
    )


def _end_tokens(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's, and those of generation_config.json."""
    ends = {tokenizer.eos_token_id} - {None}
    file = path / "generation_config.json"
    if file.exists():
        try:
            named = json.loads(file.read_text()).get("eos_token_id")
        except ValueError as error:
            raise CheckpointError(f"{file}: is not JSON: {error}") from error
        ends |= set(named if isinstance(named, list) else [named]) - {None}
    return tuple(sorted(ends))
