"""Everything a run on fixed data reads besides weights: tokenizer, rows, held-out rows."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.data.examples import ExampleDataset, load_examples
from hybridflow.data.inputs import load_tokenizer
from hybridflow.data.usable import CHECKED_BYTES
from hybridflow.errors import DataError
from hybridflow.fixed_algorithms import KTO
from hybridflow.fixed_config import FixedDataConfig


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
        known = (("data.train", self.train), ("data.heldout", self.heldout))
        return [
            f"{key}: left out {rows.num_dropped} of {len(rows) + rows.num_dropped} rows"
            for key, rows in known
            if rows is not None and rows.num_dropped
        ]


def load_fixed_inputs(config: FixedDataConfig, vocab_size: int) -> FixedInputs:
    """Read and check all of it; `vocab_size` is that of the model that is trained.

    Errors: DataError, CheckpointError naming file, field and rule.
    """
    tokenizer, heldout = load_tokenizer(Path(config.trained.model)), config.data.heldout
    inputs = FixedInputs(
        tokenizer,
        train=load_rows(config.data.train, tokenizer, config, vocab_size),
        heldout=load_rows(heldout, tokenizer, config, vocab_size) if heldout else None,
    )
    if isinstance(config.algorithm, KTO):
        for key, rows in (("data.train", inputs.train), ("data.heldout", inputs.heldout)):
            if rows is not None and len(rows) < 2:
                raise DataError(f"{key}: holds one row; kto compares each prompt with the completion of another")
    return inputs


def load_rows(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: FixedDataConfig,
    vocab_size: int,
    *,
    checked_bytes: int = CHECKED_BYTES,
) -> ExampleDataset:
    """The rows of a file as the config's algorithm takes them; files of up to `checked_bytes` are checked at once."""
    return load_examples(
        path,
        tokenizer,
        kind=config.algorithm.kind,
        max_length=config.data.max_length,
        overlong=config.data.overlong,
        vocab_size=vocab_size,
        checked_bytes=checked_bytes,
    )
