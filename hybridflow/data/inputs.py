"""Everything a run reads besides weights: tokenizer, prompts, held-out prompts and reward functions."""

import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridflow.config import ExperimentConfig, SamplingConfig
from hybridflow.config.data import DataConfig
from hybridflow.data.left_out import left_out
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.data.response_text import ResponseTexts
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.formats.json_text import parse_json
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.specs import pool_specs


@dataclass(frozen=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    train: PromptDataset
    heldout: PromptDataset | None
    functions: tuple[FunctionSpec, ...]  # that a pool of processes calls, see `rewards.specs`
    ending: str | None  # what to know of responses that nothing ends before the limit
    texts: ResponseTexts

    def decode(self, token_ids: list[int]) -> str:
        return self.texts.text(token_ids)

    def notes(self) -> list[str]:
        """What the user should know before it all starts: a line each."""
        told = [
            line
            for key, prompts in (("data.train", self.train), ("data.heldout", self.heldout))
            if prompts is not None
            for line in left_out(key, prompts.rows, "prompts longer than data.max_prompt_length")
        ]
        return [*told, *([] if self.ending is None else [self.ending])]


def load_inputs(config: ExperimentConfig, vocab_size: int) -> Inputs:
    """Read and check all of it; `vocab_size` is the actor's.

    Errors: DataError, CheckpointError, ConfigError, RewardError naming file, field and rule.
    """
    path, data = Path(config.actor.model), config.data
    _check_sampled_ids(config.sampling, vocab_size, path)
    tokenizer = load_tokenizer(path)
    ends = _end_tokens(path, tokenizer, vocab_size)
    return Inputs(
        tokenizer=tokenizer,
        eos_token_ids=ends,
        train=train_prompts(data, tokenizer, vocab_size),
        heldout=_prompts("data.heldout", tokenizer, data, vocab_size) if data.heldout else None,
        functions=pool_specs(config),
        ending=_no_end(config.sampling, ends, path),
        texts=ResponseTexts.of(
            tokenizer,
            (*ends, *config.sampling.stop_token_ids),
            special_tokens=config.reward.special_tokens if config.reward is not None else "content",
        ),
    )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Of a model's directory. Errors: CheckpointError where transformers finds none there that it can read."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: has no tokenizer that transformers can load: {error}") from error


def train_prompts(data: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> PromptDataset:
    """Those of data.train. Errors: DataError."""
    return _prompts("data.train", tokenizer, data, vocab_size)


def _prompts(key: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig, vocab_size: int) -> PromptDataset:
    files = data.heldout if key == "data.heldout" else data.train
    assert files is not None, f"{key} is not given"
    return load_prompts(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        chat_template=data.chat_template,
        max_length=data.max_prompt_length,
        overlong=data.overlong_prompts,
        vocab_size=vocab_size,
        bad_rows=data.bad_rows,
        columns=data.columns,
        checked_bytes=sys.maxsize if key == "data.heldout" else data.checked_bytes,  # which is used as a whole anyway
        key=key,
    )


def _check_sampled_ids(sampling: SamplingConfig, vocab_size: int, model: Path) -> None:
    """Raise ConfigError for a token id in the sampling section that the actor's model does not have."""
    named = {
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "logit_bias": tuple(sampling.logit_bias or ()),
    }
    for key, ids in named.items():
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"sampling.{key} names the token id {token_id}, {model} has those from 0 to vocab_size - 1 = "
                    f"{vocab_size - 1}"
                )


def _end_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's, and those of generation_config.json."""
    file = path / "generation_config.json"
    named = {f"{path}: eos_token_id of the tokenizer": {tokenizer.eos_token_id} - {None}}
    if file.exists():
        named[f"{file}: eos_token_id"] = _generation_ends(file)
    for field, ids in named.items():
        for token_id in sorted(ids):
            if not 0 <= token_id < vocab_size:
                raise CheckpointError(f"{field} = {token_id} is no token of the model: its vocab_size is {vocab_size}")
    return tuple(sorted(set().union(*named.values())))


def _generation_ends(file: Path) -> set[int]:
    """What generation_config.json says of the end: nothing, a token id, or a list of them."""
    try:
        tree = parse_json(file.read_bytes(), f"{file}: is not JSON: ")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    named = tree.get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token_id) is int for token_id in ids):
        raise CheckpointError(f"{file}: eos_token_id = {named!r} is neither a token id nor a list of token ids")
    return set(ids)


def _no_end(sampling: SamplingConfig, ends: tuple[int, ...], path: Path) -> str | None:
    """What to say where no token ends a response, though the config does not ask for that."""
    if ends or sampling.ignore_eos or sampling.stop or sampling.stop_token_ids:
        return None
    return (
        f"no end token: neither the tokenizer nor generation_config.json of {path} names one, and sampling.stop and "
        f"sampling.stop_token_ids are empty, so every response will run to sampling.max_response_length = "
        f"{sampling.max_response_length} tokens"
    )
