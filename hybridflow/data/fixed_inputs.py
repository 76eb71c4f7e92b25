"""Everything a run on fixed data reads besides weights: tokenizer, rows, held-out rows."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import DataFiles
from hybridflow.config.fixed_algorithms import KTO
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.end_tokens import end_tokens
from hybridflow.data.examples import ExampleDataset, load_examples
from hybridflow.data.rendering import Rendering, example_rendering
from hybridflow.data.row_notes import left_out_lines
from hybridflow.data.same_tokens import tokenizer_notes
from hybridflow.data.sources import Files
from hybridflow.data.templates import TemplateOptions
from hybridflow.data.tokenizers import decoded, load_tokenizer
from hybridflow.data.understood import example_summary, taught_end
from hybridflow.errors import DataError


@dataclass(frozen=True)
class FixedInputs:
    tokenizer: PreTrainedTokenizerBase
    train: ExampleDataset
    heldout: ExampleDataset | None
    tokenizers: list[str]  # what to know of the models' tokenizers
    rendering: Rendering

    @property
    def rows_by_key(self) -> Mapping[str, ExampleDataset]:
        """All rows, by the config's key."""
        return {"data.train": self.train} | ({} if self.heldout is None else {"data.heldout": self.heldout})

    def decode(self, token_ids: list[int]) -> str:
        return decoded(token_ids, self.tokenizer, skip_special_tokens=True)

    def notes(self) -> list[str]:
        """What was left out of each file."""
        return [
            line
            for key, rows in self.rows_by_key.items()
            for line in left_out_lines(key, rows.rows, "rows longer than data.max_length")
        ]

    def understood(self, config: FixedDataConfig) -> list[str]:
        """What a person should compare with what was meant: a line each."""
        lines = example_summary(config, self.train, self.tokenizer)
        return [*self.rendering.lines(config), *lines, *self.tokenizers]

    def end_token_ids(self, config: FixedDataConfig, vocab_size: int) -> tuple[int, ...]:
        """Those that the trained model ends a response with: the directory's, and the one that the rows teach."""
        known = end_tokens(Path(config.trained.model), self.tokenizer, vocab_size, template=False)
        (first,) = self.train.draw(self.train.order(config.seed, config.data.shuffle), 1).items
        taught = taught_end(first, self.tokenizer)
        return tuple(sorted({*known.ids, *([] if taught is None else [taught])}))


def load_fixed_inputs(config: FixedDataConfig, vocab_size: int) -> FixedInputs:
    """Read and check all of it; `vocab_size` is that of the model that is trained.

    Errors: DataError, CheckpointError naming file, field and rule.
    """
    tokenizer, heldout = load_tokenizer(Path(config.trained.model)), config.data.heldout
    train = load_rows(config.data.train, tokenizer, config, vocab_size)
    return FixedInputs(
        tokenizer,
        train=train,
        heldout=load_rows(  # which is used as a whole anyway
            heldout, tokenizer, config, vocab_size, key="data.heldout", checked_bytes=sys.maxsize
        )
        if heldout
        else None,
        tokenizers=tokenizer_notes(config, tokenizer),
        rendering=example_rendering(config.data, config.algorithm.kind, train.rows.files, tokenizer),
    )


def first_examples(
    key: str, config: FixedDataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, num_rows: int
) -> tuple[Files, int]:
    """The files of a key, and how many of their first rows could be read as a run reads them. Errors: DataError."""
    found = load_rows(config.data.files_by_key[key], tokenizer, config, vocab_size, key=key, checked_bytes=0)
    return found.rows.files, found.rows.look_at_first(num_rows)


def load_rows(
    files: DataFiles,
    tokenizer: PreTrainedTokenizerBase,
    config: FixedDataConfig,
    vocab_size: int,
    *,
    key: str = "data.train",
    checked_bytes: int | None = None,
) -> ExampleDataset:
    """The rows of files as the config's algorithm takes them; `checked_bytes` in place of what the config says."""
    rows = load_examples(
        files,
        tokenizer,
        kind=config.algorithm.kind,
        max_length=config.data.max_length,
        overlong=config.data.overlong,
        vocab_size=vocab_size,
        bad_rows=config.data.bad_rows,
        columns=config.data.columns,
        template=TemplateOptions(
            config.data.chat_template_kwargs,
            config.data.message_format,
            config.data.assistant_turns,
            model_key=f"{config.trained_name}.model",
        ),
        checked_bytes=config.data.checked_bytes if checked_bytes is None else checked_bytes,
        key=key,
    )
    if isinstance(config.algorithm, KTO) and len(rows) < 2:
        raise DataError(f"{key}: holds one row; kto compares each prompt with the completion of another")
    return rows
