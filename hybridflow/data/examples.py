"""Examples for training on fixed data: token sequences, and which of their tokens count.

    examples = load_examples("data/pairs.jsonl", tokenizer, kind="pairs", max_length=1024, vocab_size=32000)
    drawn = examples.draw(examples.order(seed=0, shuffle=True), 64)

`example_texts` says which fields a row has. A prompt has the tokens that a run would generate from: special tokens in
front, no end token. The tokens of prompt and completion together are those of the joint text where these begin with the
prompt's own, as most tokenizers have it; where a token would reach over the boundary, the completion is encoded by
itself. The tokenizer's end token is put after a completion that does not have it, and is trained, as TRL does: what
never saw an end does not learn to stop. Of a conversation the tokens of the assistant count (`chat`), and the end token
where the template has one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import DataFiles
from hybridflow.data.chat import Rendered
from hybridflow.data.example_texts import ExampleTexts, Kind, Plain, example_texts
from hybridflow.data.fields import rename_fields
from hybridflow.data.rows import OverlongError, Row, RowError, attempt, shown
from hybridflow.data.sources import open_files
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.data.usable import CHECKED_BYTES, Drawn, Dropped, Order, Rules, UsableRows
from hybridflow.errors import DataError


@dataclass(frozen=True)
class Example:
    sequences: tuple[Tensor, ...]  # int64 token ids: one for sft and labelled; (chosen, rejected) for pairs
    trained: tuple[Tensor, ...]  # bool, of the same lengths: the tokens that count
    prompt_lengths: tuple[int, ...]  # tokens before the first that counts
    label: bool = True  # labelled: whether the completion is wanted
    margin: float = 0.0  # pairs: by how much chosen should be better
    repeats_prompt: bool = False  # what follows the prompt begins with the prompt itself


@dataclass(frozen=True)
class ExampleTokens:
    ids: list[int]
    trained: list[bool]

    @property
    def prompt_length(self) -> int:
        return self.trained.index(True)


Problem = str  # why there are no tokens, for a message that says where


class ExampleDataset:
    """Examples of files, encoded when they are asked for; see `usable` for what is checked when."""

    def __init__(self, rows: UsableRows[Example]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, seed: int, shuffle: bool, *, position: int = 0) -> Order:
        return self.rows.order(seed, shuffle, position=position)

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """In this order; one may appear twice. Errors: DataError for a row that cannot be used."""
        return self.rows.items_at(indices)

    def draw(self, order: Order, count: int) -> Drawn[Example]:
        """The next `count` in order: `drawn.items`; rows that are left out are passed over."""
        return self.rows.draw(order, count)

    @property
    def digest(self) -> bytes:
        return self.rows.files.digest

    @property
    def dropped(self) -> Dropped:
        """Rows that were left out at the start."""
        return self.rows.dropped


def load_examples(
    path: DataFiles | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: Kind,
    max_length: int,
    vocab_size: int,
    overlong: Literal["drop", "error"] = "error",
    bad_rows: Literal["drop", "error"] = "error",
    columns: Mapping[str, str] | None = None,
    template: TemplateOptions | None = None,
    checked_bytes: int = CHECKED_BYTES,
    key: str = "data.train",
) -> ExampleDataset:
    """Find the rows of files, and check them where these are no larger than `checked_bytes`.

    Args:
        max_length: tokens a sequence may have, the end token included.
        vocab_size: the token ids that the model knows are those below it.
        overlong: what happens to an example with a longer sequence: it is left out and counted, or it is an error.
        bad_rows: the same of a row that cannot be used.
        columns: which fields of a row stand for ours.
        template: what enters the chat template beside a row.
        key: that of the config, for messages.

    Raises:
        DataError: a file or a row cannot be used; names the file, the line and the rule.
    """
    options = template or TemplateOptions()
    encoder = _Encoder(tokenizer, kind, max_length, vocab_size, dict(columns or {}), template=options)
    ChatTemplate(tokenizer, options).check_options()
    rows = UsableRows(open_files(path, key), encoder.encoded, Rules(bad_rows, overlong), checked_bytes=checked_bytes)
    if not len(rows):
        raise DataError(f"{key}: no row is left: {next(iter(rows.dropped.first.values()))}")
    return ExampleDataset(rows)


@dataclass(frozen=True)
class _Encoder:
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    max_length: int
    vocab_size: int
    columns: Mapping[str, str]
    template: TemplateOptions

    def encoded(self, rows: Sequence[Row]) -> list[Example | RowError]:
        found = [attempt(self._texts, row) for row in rows]
        made = iter(
            _tokens([one for row in found if isinstance(row, ExampleTexts) for one in row.sequences], self.tokenizer)
        )
        return [
            row if isinstance(row, RowError) else self._example(row, [next(made) for _ in row.sequences])
            for row in found
        ]

    def _texts(self, row: Row) -> ExampleTexts:
        return example_texts(rename_fields(row, self.columns), self.kind, self.tokenizer, self.template)

    def _example(self, texts: ExampleTexts, made: Sequence[ExampleTokens | Problem]) -> Example | RowError:
        whole = [one for one in made if isinstance(one, ExampleTokens)]
        for one in made:
            problem = self._problem(texts.where, one)
            if problem is not None:
                return problem
        return Example(
            sequences=tuple(torch.tensor(one.ids, dtype=torch.int64) for one in whole),
            trained=tuple(torch.tensor(one.trained) for one in whole),
            prompt_lengths=tuple(one.prompt_length for one in whole),
            label=texts.label,
            margin=texts.margin,
            repeats_prompt=texts.repeats_prompt,
        )

    def _problem(self, where: str, tokens: ExampleTokens | Problem) -> RowError | None:
        if isinstance(tokens, Problem):
            return RowError(f"{where}: {tokens}", "no tokens")
        ids = tokens.ids
        if len(ids) > self.max_length:
            return OverlongError(
                f"{where}: the example has {len(ids)} tokens, more than data.max_length = {self.max_length}; "
                f"data.overlong=drop leaves such examples out, or set data.max_length={len(ids)}",
                len(ids),
            )
        for token_id in (max(ids), min(ids)):
            if not 0 <= token_id < self.vocab_size:
                name = shown(self.tokenizer.convert_ids_to_tokens(token_id)) if token_id > 0 else "below 0"
                return RowError(
                    f"{where}: the example has the token id {token_id} ({name}), but the model's ids are below "
                    f"vocab_size = {self.vocab_size}",
                    "unknown token",
                )
        return None


def _tokens(texts: Sequence[Plain | Rendered], tokenizer: PreTrainedTokenizerBase) -> list[ExampleTokens | Problem]:
    """Of each; encoded together, which fast tokenizers do on several threads."""
    plain = iter(_of_pairs([text for text in texts if isinstance(text, Plain)], tokenizer))
    chats = iter(_of_chats([text for text in texts if isinstance(text, Rendered)], tokenizer))
    return [next(plain) if isinstance(text, Plain) else next(chats) for text in texts]


# ------------------------------------------------------------------------------------------------ conversations


def _of_chats(chats: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> list[ExampleTokens | Problem]:
    if not chats:
        return []
    if not tokenizer.is_fast:  # the others do not say which characters a token stands for
        return ["the assistant's tokens cannot be told with this tokenizer, which has no tokenizer.json"] * len(chats)
    encoded = tokenizer(
        [chat.text for chat in chats], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    found = zip(chats, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [_masked(chat, ids, offsets) for chat, ids, offsets in found]


def _masked(chat: Rendered, ids: list[int], offsets: list[tuple[int, int]]) -> ExampleTokens | Problem:
    """A token counts where all characters of the token do."""
    counts = np.zeros(len(chat.text) + 1, np.int64)
    for start, end in chat.spans:
        counts[start + 1 : end + 1] = 1
    before = np.cumsum(counts)  # characters that count before a place
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    counting = before[ends] - before[starts]
    partly = np.flatnonzero((counting > 0) & (counting < ends - starts))
    if len(partly):
        start, end = offsets[int(partly[0])]
        return f"the token {chat.text[start:end]!r} reaches over the boundary of what the assistant says"
    trained = ((counting > 0) & (counting == ends - starts)).tolist()
    return ExampleTokens(ids, trained) if any(trained) else "the tokenizer makes no tokens of what the assistant says"


# ------------------------------------------------------------------------------------------------ prompt and completion


def _of_pairs(pairs: Sequence[Plain], tokenizer: PreTrainedTokenizerBase) -> list[ExampleTokens | Problem]:
    texts = [(pair.prompt, pair.completion) for pair in pairs]
    encoded = iter(_encoded([(p, c) for p, c in texts if isinstance(p, str) and isinstance(c, str)], tokenizer))
    end = tokenizer.eos_token_id
    return [
        _joined(*((p, _without_end(c, end)) if isinstance(p, list) and isinstance(c, list) else next(encoded)), end=end)
        for p, c in texts
    ]


def _joined(prompt: list[int], completion: list[int], *, end: int | None) -> ExampleTokens | Problem:
    for name, ids in (("prompt", prompt), ("completion", completion)):  # a first token is predicted from nothing
        if not ids:
            return f"the tokenizer makes no tokens of the {name}"
    ended = completion if end is None else [*completion, end]
    return ExampleTokens(prompt + ended, [False] * len(prompt) + [True] * len(ended))


def _encoded(pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Of prompt and completion; neither with an end token."""
    end = tokenizer.eos_token_id
    prompts = [_without_end(ids, end) for ids in _ids([p for p, _ in pairs], tokenizer, special=True)]
    joint = [_without_end(ids, end) for ids in _ids([p + c for p, c in pairs], tokenizer, special=True)]
    split = [ids[: len(prompt)] != prompt for ids, prompt in zip(joint, prompts, strict=True)]
    alone = iter(_ids([c for (_, c), apart in zip(pairs, split, strict=True) if apart], tokenizer, special=False))
    return [
        (prompt, _without_end(next(alone), end) if apart else ids[len(prompt) :])
        for ids, prompt, apart in zip(joint, prompts, split, strict=True)
    ]


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, special: bool) -> list[list[int]]:
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]
    return encoded


def _without_end(ids: list[int], end: int | None) -> list[int]:
    return ids[:-1] if ids and ids[-1] == end else ids
