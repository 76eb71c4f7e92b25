"""Everything a run on fixed data reads besides weights: tokenizer, rows, held-out rows."""

import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import DataFiles
from hybridflow.config.fixed_algorithms import KTO
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.examples import ExampleDataset, load_examples
from hybridflow.data.inputs import load_tokenizer
from hybridflow.data.left_out import left_out
from hybridflow.errors import DataError


@dataclass(frozen=True)
class FixedInputs:
    tokenizer: PreTrainedTokenizerBase
    train: ExampleDataset
    heldout: ExampleDataset | None

    def decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), f"one sequence was decoded to {type(text).__name__}"
        return text

    def notes(self) -> list[str]:
        """What was left out of each file."""
        return [
            line
            for key, rows in (("data.train", self.train), ("data.heldout", self.heldout))
            if rows is not None
            for line in left_out(key, rows.rows, "rows longer than data.max_length")
        ]


def load_fixed_inputs(config: FixedDataConfig, vocab_size: int) -> FixedInputs:
    """Read and check all of it; `vocab_size` is that of the model that is trained.

    Errors: DataError, CheckpointError naming file, field and rule.
    """
    tokenizer, heldout = load_tokenizer(Path(config.trained.model)), config.data.heldout
    inputs = FixedInputs(
        tokenizer,
        train=load_rows(config.data.train, tokenizer, config, vocab_size),
        heldout=load_rows(  # which is used as a whole anyway
            heldout, tokenizer, config, vocab_size, key="data.heldout", checked_bytes=sys.maxsize
        )
        if heldout
        else None,
    )
    if isinstance(config.algorithm, KTO):
        for key, rows in (("data.train", inputs.train), ("data.heldout", inputs.heldout)):
            if rows is not None and len(rows) < 2:
                raise DataError(f"{key}: holds one row; kto compares each prompt with the completion of another")
    return inputs


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
    return load_examples(
        files,
        tokenizer,
        kind=config.algorithm.kind,
        max_length=config.data.max_length,
        overlong=config.data.overlong,
        vocab_size=vocab_size,
        bad_rows=config.data.bad_rows,
        columns=config.data.columns,
        checked_bytes=config.data.checked_bytes if checked_bytes is None else checked_bytes,
        key=key,
    )
