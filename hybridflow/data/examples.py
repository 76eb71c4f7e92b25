"""Examples for training on fixed data: token sequences, and which of their tokens count.

    examples = load_examples("data/pairs.jsonl", tokenizer, kind="pairs", max_length=1024, vocab_size=32000)
    [first, other] = examples.examples([0, 7])

| kind | fields of a row | sequences |
|---|---|---|
| sft | prompt, completion | the two of them, one after the other |
| pairs | prompt, chosen, rejected, optionally margin | (prompt and chosen, prompt and rejected) |
| labelled | prompt, completion, label | prompt and completion |

A prompt has the tokens that a run would generate from: special tokens in front, no end token. The tokens of prompt and
completion together are those of the joint text where these begin with the prompt's own, as most tokenizers have it;
where a token would reach over the boundary, the completion is encoded by itself. The tokenizer's end token is put after
a completion that does not have it, and is trained, as TRL does: what never saw an end does not learn to stop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.data.json_lines import JsonLines
from hybridflow.data.rows import OverlongError, Row, RowError, attempt, shown
from hybridflow.data.usable import CHECKED_BYTES, Drawn, Dropped, Order, Rules, UsableRows
from hybridflow.errors import DataError

Kind = Literal["sft", "pairs", "labelled"]  # labelled: completions that are wanted or not, as KTO has them


@dataclass(frozen=True)
class Example:
    sequences: tuple[Tensor, ...]  # int64 token ids: one for sft and labelled; (chosen, rejected) for pairs
    trained: tuple[Tensor, ...]  # bool, of the same lengths: the tokens that count
    prompt_lengths: tuple[int, ...]  # tokens before the first that counts
    label: bool = True  # labelled: whether the completion is wanted
    margin: float = 0.0  # pairs: by how much chosen should be better


class ExampleDataset:
    """Examples of files, encoded when they are asked for; see `usable` for what is checked when."""

    def __init__(self, rows: UsableRows[Example]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """In this order; one may appear twice. Errors: DataError for a row that cannot be used."""
        return self._rows.at(indices)

    def draw(self, order: Order, count: int) -> Drawn[Example]:
        """The next `count` in order: `drawn.items`; rows that are left out are passed over."""
        return self._rows.draw(order, count)

    @property
    def digest(self) -> bytes:
        return self._rows.rows.digest

    @property
    def dropped(self) -> Dropped:
        """Rows that were left out at the start."""
        return self._rows.dropped

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.counts.values())


def load_examples(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: Kind,
    max_length: int,
    vocab_size: int,
    overlong: Literal["drop", "error"] = "error",
    bad_rows: Literal["drop", "error"] = "error",
    checked_bytes: int = CHECKED_BYTES,
) -> ExampleDataset:
    """Find the rows of a file, and check them where it is no larger than `checked_bytes`.

    Args:
        max_length: tokens a sequence may have, the end token included.
        vocab_size: the token ids that the model knows are those below it.
        overlong: what happens to an example with a longer sequence: it is left out and counted, or it is an error.
        bad_rows: the same of a row that cannot be used.

    Raises:
        DataError: the file or a row cannot be used; names the file, the line and the rule.
    """
    rows = JsonLines(Path(path))
    if not len(rows):
        raise DataError(f"{path}: holds no row; expected one JSON object a line")
    encoder = _Encoder(tokenizer, kind, max_length, vocab_size)
    usable = UsableRows(rows, encoder.encoded, Rules(bad_rows, overlong), checked_bytes=checked_bytes)
    if not len(usable):
        raise DataError(f"{path}: no row is left: {next(iter(usable.dropped.first.values()))}")
    return ExampleDataset(usable)


# ------------------------------------------------------------------------------------------------ from rows to texts


@dataclass(frozen=True)
class _Texts:
    where: str
    pairs: tuple[tuple[str, str], ...]  # prompt and completion of each sequence
    label: bool
    margin: float


def _texts(row: Row, kind: Kind) -> _Texts:
    prompt = _text(row, "prompt")
    names = ("chosen", "rejected") if kind == "pairs" else ("completion",)
    completions = [_text(row, name) for name in names]
    return _Texts(
        row.where,
        tuple((prompt, completion) for completion in completions),
        label=_label(row) if kind == "labelled" else True,
        margin=_margin(row) if kind == "pairs" and "margin" in row.fields else 0.0,
    )


def _field(row: Row, name: str) -> Any:
    if name not in row.fields:
        raise RowError(
            f"{row.where}: has no field {name!r}; its fields are {', '.join(row.fields) or 'none'}", f"no {name}"
        )
    return row.fields[name]


def _text(row: Row, name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise RowError(
            f"{row.where}: {name} = {shown(value)} is a {type(value).__name__}, expected a text", "wrong type"
        )
    if not value:
        raise RowError(f"{row.where}: {name} = '' is empty", "empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, written as \ud83d
        raise RowError(
            f"{row.where}: {name} holds {value[error.start]!r}, which is no character", "not UTF-8"
        ) from error
    return value


def _label(row: Row) -> bool:
    value = _field(row, "label")
    if type(value) is not bool and value not in (0, 1):
        raise RowError(f"{row.where}: label = {shown(value)}, expected true or false", "wrong type")
    return bool(value)


def _margin(row: Row) -> float:
    value = row.fields["margin"]
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise RowError(f"{row.where}: margin = {shown(value)}, expected a finite number", "wrong type")
    return float(value)


# ------------------------------------------------------------------------------------------------ from texts to tokens


@dataclass(frozen=True)
class _Encoder:
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    max_length: int
    vocab_size: int

    def encoded(self, rows: Sequence[Row]) -> list[Example | RowError]:
        texts = [attempt(lambda row: _texts(row, self.kind), row) for row in rows]
        pairs = [pair for found in texts if isinstance(found, _Texts) for pair in found.pairs]
        tokens = iter(self._tokens(pairs))
        return [
            found if isinstance(found, RowError) else self._example(found, [next(tokens) for _ in found.pairs])
            for found in texts
        ]

    def _tokens(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Of prompt and completion, for each pair; without an end token."""
        prompts = [self._without_end(ids) for ids in self._ids([prompt for prompt, _ in pairs], special=True)]
        joint = [self._without_end(ids) for ids in self._ids([a + b for a, b in pairs], special=True)]
        alone = iter(
            self._ids(
                [pair[1] for pair, p, j in zip(pairs, prompts, joint, strict=True) if j[: len(p)] != p], special=False
            )
        )
        return [
            (p, j[len(p) :] if j[: len(p)] == p else self._without_end(next(alone)))
            for p, j in zip(prompts, joint, strict=True)
        ]

    def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
        return encoded

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _with_end(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids if end is None or not ids else [*ids, end]

    def _example(self, texts: _Texts, tokens: list[tuple[list[int], list[int]]]) -> Example | RowError:
        tokens = [(prompt, self._with_end(completion)) for prompt, completion in tokens]
        for prompt, completion in tokens:
            problem = self._problem(texts.where, prompt, completion)
            if problem is not None:
                return problem
        return Example(
            sequences=tuple(torch.tensor(prompt + completion, dtype=torch.int64) for prompt, completion in tokens),
            trained=tuple(torch.arange(len(p) + len(c)) >= len(p) for p, c in tokens),
            prompt_lengths=tuple(len(prompt) for prompt, _ in tokens),
            label=texts.label,
            margin=texts.margin,
        )

    def _problem(self, where: str, prompt: list[int], completion: list[int]) -> RowError | None:
        length = len(prompt) + len(completion)
        for name, ids in (("prompt", prompt), ("completion", completion)):  # a first token is predicted from nothing
            if not ids:
                return RowError(f"{where}: the tokenizer makes no tokens of the {name}", "empty")
        if length > self.max_length:
            return OverlongError(
                f"{where}: the example has {length} tokens, more than data.max_length = {self.max_length}; "
                f"data.overlong: drop leaves such examples out",
                length,
            )
        largest = max(prompt + completion)
        if largest >= self.vocab_size:
            return RowError(
                f"{where}: the example has the token id {largest} "
                f"({shown(self.tokenizer.convert_ids_to_tokens(largest))}), the model knows those below its "
                f"vocab_size = {self.vocab_size}",
                "unknown token",
            )
        return None
