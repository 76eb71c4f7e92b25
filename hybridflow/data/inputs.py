"""Everything a run reads besides weights: tokenizer, prompts, held-out prompts and what counts as right."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridflow.config import DataConfig, ExperimentConfig
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.errors import CheckpointError
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


def load_inputs(config: ExperimentConfig) -> Inputs:
    """Read and check all of it. Errors: DataError, CheckpointError, RewardError naming file, field and rule."""
    path, data = Path(config.actor.model), config.data
    tokenizer = _load_tokenizer(path)
    return Inputs(
        tokenizer=tokenizer,
        eos_token_ids=_end_tokens(path, tokenizer),
        train=_prompts(data.train, tokenizer, data),
        heldout=_prompts(data.heldout, tokenizer, data) if data.heldout else None,
        right=load_reward_function(config.metrics.eval_reward) if config.metrics.eval_reward else None,
    )


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
