"""Everything a run reads besides weights: tokenizer, prompts, held-out prompts and reward functions."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from hybridflow.config import ExperimentConfig, SamplingConfig
from hybridflow.config.data import DataConfig, DataFiles, heldout_key
from hybridflow.config.rewards import ScoringConfig
from hybridflow.data.end_tokens import EndTokens, end_tokens
from hybridflow.data.environment import AgentInputs, EnvironmentInputs, environment_inputs
from hybridflow.data.fields import rename_fields
from hybridflow.data.first_rows import renders
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.data.rendering import Rendering, prompt_rendering
from hybridflow.data.response_text import ResponseTexts
from hybridflow.data.row_notes import left_out_lines
from hybridflow.data.rows import RowError, attempt
from hybridflow.data.same_tokens import tokenizer_notes
from hybridflow.data.sources import Files, open_files
from hybridflow.data.templates import TemplateOptions
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.data.understood import prompt_summary
from hybridflow.errors import ConfigError, remedy
from hybridflow.rewards.functions import FunctionSpec
from hybridflow.rewards.specs import check_row, pool_specs


@dataclass(frozen=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    ends: EndTokens
    train: PromptDataset
    heldout: Mapping[str, PromptDataset]  # by name; "" of the only set
    functions: tuple[FunctionSpec, ...]  # that a pool of processes calls, see `rewards.specs`
    ending: str | None  # what to know of responses that nothing ends before the limit
    tokenizers: list[str]  # what to know of the models' tokenizers
    texts: ResponseTexts
    chat_template: bool  # whether the chat template renders prompts
    rendering: Rendering
    environment: EnvironmentInputs | AgentInputs | None = None

    @property
    def rows_by_key(self) -> Mapping[str, PromptDataset]:
        """All prompts, by the config's key."""
        return {"data.train": self.train, **{heldout_key(name): each for name, each in self.heldout.items()}}

    def decode(self, token_ids: list[int]) -> str:
        return self.texts.text(token_ids)

    def all_cut(self, sampling: SamplingConfig, iteration: int, num_responses: int) -> str:
        """What to say where no response of an iteration has an end token."""
        return (
            f"warning: iteration {iteration}: all {num_responses} responses are cut at sampling.max_response_length = "
            f"{sampling.max_response_length} tokens: none has an end token ({self.ends.described(self.tokenizer)})"
        )

    def notes(self) -> list[str]:
        """What the user should know before it all starts: a line each."""
        lines = [
            line
            for key, prompts in self.rows_by_key.items()
            for line in left_out_lines(key, prompts.rows, "prompts longer than data.max_prompt_length")
        ]
        return [*lines, *([] if self.ending is None else [self.ending])]

    def understood(self, config: ExperimentConfig) -> list[str]:
        """What a person should compare with what was meant: a line each."""
        lines = prompt_summary(config, self.train, self.ends, self.tokenizer)
        return [*self.rendering.lines(config), *lines, *self.tokenizers]


def load_inputs(
    config: ExperimentConfig, vocab_size: int, *, num_ranks: int = 1, group: dist.ProcessGroup | None = None
) -> Inputs:
    """Read and check all of it; `vocab_size` is the actor's. num_ranks: on this machine.

    group: of the ranks that read it at the same time, of which the first asks an environment how rows begin; then
    drawing prompts is collective over it.

    Errors: DataError, CheckpointError, ConfigError, RewardError naming file, field and rule.
    """
    path, data = Path(config.actor.model), config.data
    _check_sampled_ids(config.sampling, vocab_size, path)
    tokenizer = load_tokenizer(path)
    train = open_files(data.train, "data.train")
    by_template = renders(data, train)
    ends = end_tokens(path, tokenizer, vocab_size, template=by_template)
    scoring = config.reward or ScoringConfig()
    environment = environment_inputs(data, scoring, tokenizer, ends, num_ranks=num_ranks, group=group)
    prompts = {
        key: _prompts(
            key,
            train if key == "data.train" else files,
            tokenizer,
            data,
            by_template,
            vocab_size=vocab_size,
            environment=environment,
            check=partial(check_row, config, key),
        )
        for key, files in data.files_by_key.items()
    }
    return Inputs(
        tokenizer=tokenizer,
        ends=ends,
        train=prompts["data.train"],
        heldout={name: prompts[heldout_key(name)] for name in data.heldout_sets},
        functions=pool_specs(config),
        ending=_no_end(config.sampling, ends.ids, path),
        tokenizers=tokenizer_notes(config, tokenizer),
        texts=ResponseTexts.from_tokenizer(
            tokenizer,
            (*ends.ids, *config.sampling.stop_token_ids),
            special_tokens=config.reward.special_tokens if config.reward is not None else "content",
        ),
        chat_template=by_template,
        rendering=prompt_rendering(data, train, tokenizer, by_template=by_template),
        environment=environment,
    )


def train_prompts(
    config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[PromptDataset, EndTokens, bool]:
    """Those of data.train, what ends a response to them, and whether the chat template renders them.

    Errors: DataError, CheckpointError, ConfigError."""
    data, train = config.data, open_files(config.data.train, "data.train")
    by_template = renders(data, train)
    ends = end_tokens(Path(config.actor.model), tokenizer, vocab_size, template=by_template)
    environment = environment_inputs(data, ScoringConfig(), tokenizer, ends, num_ranks=1)
    check = partial(check_row, config, "data.train")
    prompts = _prompts(
        "data.train",
        train,
        tokenizer,
        data,
        by_template,
        vocab_size=vocab_size,
        environment=environment,
        check=check,
    )
    return prompts, ends, by_template


def check_ends(config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Whether the model has what ends a response. Errors: ConfigError, CheckpointError."""
    path = Path(config.actor.model)
    _check_sampled_ids(config.sampling, vocab_size, path)
    end_tokens(path, tokenizer, vocab_size, template=False)


def first_prompts(
    key: str, config: ExperimentConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, num_rows: int
) -> tuple[Files, int]:
    """The files of a key, and how many of their first rows could be read as a run reads them.

    An environment begins no row here: where it makes the prompts, files alone are read. Errors: as `load_inputs`.
    """
    data = config.data
    files = open_files(data.files_by_key[key], key)
    if data.environment is not None and data.environment.begins_rows:
        return files, _num_named(files, data, num_rows)
    given = data.chat_template is not None or data.environment is not None or key == "data.train"
    prompts = _prompts(
        key,
        files,
        tokenizer,
        data,
        renders(data, files if given else open_files(data.train, "data.train")),
        vocab_size=vocab_size,
        environment=None,
        check=partial(check_row, config, key),
        looks=False,
    )
    return files, prompts.rows.look_at_first(num_rows)


def _num_named(files: Files, data: DataConfig, num_rows: int) -> int:
    """How many of so many first rows have the fields that data.columns names. Errors: DataError unless dropped."""
    rows = files.rows_at(range(min(num_rows, len(files))))
    named = [attempt(lambda row: rename_fields(row, data.columns), row) for row in rows if row.problem is None]
    wrong = [row.problem for row in rows if row.problem] + [each for each in named if isinstance(each, RowError)]
    if wrong and data.bad_rows == "error":
        raise wrong[0]
    return len(rows) - len(wrong)


def _prompts(
    key: str,
    files: DataFiles | Files,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    by_template: bool,
    *,
    vocab_size: int,
    environment: EnvironmentInputs | AgentInputs | None,
    check: Callable[[Mapping[str, Any]], None],
    looks: bool = True,
) -> PromptDataset:
    """looks: at rows, which nobody draws otherwise."""
    texts = data.chat_template is not None or data.environment is not None
    return load_prompts(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        chat_template=by_template,
        max_length=data.max_prompt_length,
        overlong=data.overlong_prompts,
        vocab_size=vocab_size,
        bad_rows=data.bad_rows,
        columns=data.columns,
        template=TemplateOptions(data.chat_template_kwargs, data.message_format, texts=texts),
        checked_bytes=_checked_bytes(key, data) if looks else 0,
        draws=looks,
        key=key,
        check=check,
        **({} if environment is None else environment.hooks(key)),
    )


def _checked_bytes(key: str, data: DataConfig) -> int:
    """Held-out rows are used as a whole anyway; of an environment a row is begun when it is drawn, and no earlier."""
    if key != "data.train":
        return sys.maxsize
    begins = data.environment is not None and data.environment.begins_rows
    return 0 if begins else data.checked_bytes


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
                others = [each for each in ids if 0 <= each < vocab_size]
                fitting = others if key == "stop_token_ids" or (others and key == "allowed_token_ids") else None
                raise ConfigError(
                    f"sampling.{key} names the token id {token_id}, but {model} has the ids from 0 to vocab_size - 1 = "
                    f"{vocab_size - 1}{remedy({f'sampling.{key}': [fitting]})}"
                )


def _no_end(sampling: SamplingConfig, ends: tuple[int, ...], path: Path) -> str | None:
    """What to say where no token ends a response, though the config does not ask for that."""
    if ends or sampling.ignore_eos or sampling.stop or sampling.stop_token_ids:
        return None
    return (
        f"no end token: tokenizer, generation_config.json and config.json of {path} name none, and sampling.stop and "
        "sampling.stop_token_ids are empty. Every response will have sampling.max_response_length = "
        f"{sampling.max_response_length} tokens"
    )
