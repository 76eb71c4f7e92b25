"""Prompts: rows of data files in, packed PromptBatch out, in an order that can be resumed.

    dataset = load_prompts("data/train.jsonl", tokenizer, prompt_key="prompt", chat_template=False,
                           max_length=512, overlong="drop", vocab_size=32000)
    order = dataset.order(seed=0, shuffle=True)
    drawn = dataset.draw(order, 64)

A row's `prompt_key` holds the prompt: a text, or with `chat_template` a list of messages such as
{"role": "user", "content": "..."}. Every other key is a column that travels to the reward functions, so all rows have
the same ones. Neither texts nor tokens stay in memory: a row is read and encoded when it is asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import PromptBatch
from hybridflow.config.data import DataFiles
from hybridflow.data.fields import rename_fields
from hybridflow.data.messages import Message, check_encodable, check_token_ids
from hybridflow.data.order import PromptOrder
from hybridflow.data.prompt_texts import PromptText, prompt_text
from hybridflow.data.rows import NotStarted, OverlongError, Row, RowError, attempt, shown
from hybridflow.data.sources import Files, open_files
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.data.tokenizers import decoded
from hybridflow.data.usable import CHECKED_BYTES, Dropped, Order, Rules, UsableRows
from hybridflow.errors import DataError

MOST_KEPT = 4096  # prompts


@dataclass(frozen=True)
class Prompt:
    text: str  # with a chat template, the rendered conversation
    token_ids: list[int]
    columns: dict[str, Any]
    messages: list[Message] | None = None  # of a conversation


@dataclass(frozen=True)
class Begun:
    """What an environment begins a row with; None where that is not known yet, and the prompt has no tokens.

    fields: of the row, as the chat template reads them. failed: what it is where the template cannot render it.
    """

    messages: list[Message] | None
    fields: Mapping[str, Any]
    failed: Callable[[str], RowError] = lambda problem: RowError(problem, "not rendered")


FirstMessages = Callable[[Sequence[Row]], list[Begun | RowError]]


@dataclass(frozen=True)
class DrawnPrompts:
    batch: PromptBatch
    numbers: tuple[int, ...]  # of the batch's prompts in the data set
    dropped: Dropped  # rows that were passed over


class PromptDataset:
    """Prompts of files; see `usable` for what is checked when."""

    def __init__(
        self, rows: UsableRows[Prompt], column_names: Sequence[str], start_ahead: Callable[[Sequence[Row]], None] | None
    ) -> None:
        """start_ahead: of an environment, for the rows of the next draw."""
        self.rows, self.column_names, self._start_ahead = rows, tuple(column_names), start_ahead
        self._begun: dict[int, Prompt] = {}  # of the last draws, in case that an environment does not begin one again

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, seed: int, shuffle: bool, *, position: int = 0) -> Order:
        return self.rows.order(seed, shuffle, position=position)

    def batch(self, indices: Sequence[int]) -> PromptBatch:
        """The prompts at `indices`, in this order; one may appear twice.

        Errors: DataError if the file is no longer what it was when it was loaded.
        """
        found = self.rows.items_or_errors_at(indices)
        known = [
            self._begun.get(number, item) if isinstance(item, NotStarted) else item
            for number, item in zip(indices, found, strict=True)
        ]
        for item in known:
            if isinstance(item, RowError):
                raise item
        return self._packed([item for item in known if not isinstance(item, RowError)])

    def all_that_start(self) -> PromptBatch:
        """All prompts but those that an environment does not begin now. Errors: DataError where none is left."""
        found = self.rows.items_or_errors_at(range(len(self)))
        wrong = [item for item in found if isinstance(item, RowError)]
        started = [item for item in found if not isinstance(item, RowError)]
        for error in wrong:
            if not isinstance(error, NotStarted) or not started:
                raise error
        return self._packed(started)

    def draw(self, order: Order, count: int) -> DrawnPrompts:
        """The next `count` prompts in order; rows that are left out are passed over."""
        drawn = self.rows.draw(order, count)
        if drawn.dropped.num_not_started or self.rows.not_started.num_rows:
            kept = list(self._begun.items())[-MOST_KEPT:]
            self._begun = dict(kept) | dict(zip(drawn.numbers, drawn.items, strict=True))
        return DrawnPrompts(self._packed(drawn.items), tuple(drawn.numbers), drawn.dropped)

    def start_ahead(self, order: Order, count: int) -> None:
        """Let an environment begin the rows that `draw` looks at first the next time."""
        if self._start_ahead is not None:
            self._start_ahead(self.rows.rows_ahead(order, count))

    @property
    def digest(self) -> bytes:
        return self.rows.files.digest

    @property
    def dropped(self) -> Dropped:
        """Rows that were left out at the start."""
        return self.rows.dropped

    def _packed(self, prompts: Sequence[Prompt]) -> PromptBatch:
        return PromptBatch(
            input_ids=torch.tensor([i for prompt in prompts for i in prompt.token_ids], dtype=torch.int64),
            lengths=torch.tensor([len(prompt.token_ids) for prompt in prompts], dtype=torch.int64),
            texts=tuple(prompt.text for prompt in prompts),
            columns={name: tuple(prompt.columns[name] for prompt in prompts) for name in self.column_names},
            conversations=tuple(prompt.messages for prompt in prompts),
        )


def load_prompts(
    path: DataFiles | Path | Files,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    chat_template: bool,
    max_length: int,
    overlong: Literal["drop", "error"],
    vocab_size: int,
    bad_rows: Literal["drop", "error"] = "error",
    columns: Mapping[str, str] | None = None,
    template: TemplateOptions | None = None,
    checked_bytes: int = CHECKED_BYTES,
    key: str = "data.train",
    first_messages: FirstMessages | None = None,
    start_ahead: Callable[[Sequence[Row]], None] | None = None,
    agrees: Callable[[bytes], None] = lambda digest: None,
    check: Callable[[Mapping[str, Any]], None] = lambda columns: None,
    draws: bool = True,
) -> PromptDataset:
    """Find the rows of files, and check them where these are no larger than `checked_bytes`. Blank lines are skipped.

    Args:
        prompt_key: the key of a row that holds the prompt.
        chat_template: the prompt is a list of messages, or the text of one of the user's, rendered by the tokenizer's
            chat template.
        max_length: tokens a prompt may have, special tokens included.
        overlong: what happens to a longer one: it is left out and counted, or it is an error.
        vocab_size: the token ids that the model knows are those below it.
        bad_rows: what happens to a row that cannot be used: as with overlong.
        columns: which fields of a row stand for ours.
        template: what enters the chat template beside a row.
        key: that of the config, for messages.
        first_messages: of an environment, which begins the conversation of a row; then all of a row are columns.
        start_ahead: of that environment, which may begin the rows of the next draw already.
        agrees: is given the digest of the files before rows are looked at, and may raise.
        check: raises a ValueError where the columns of a row cannot be scored.
        draws: False: nobody will draw, and rows that are not checked are not looked at.

    Raises:
        DataError: a file, a row or a prompt cannot be used; names the file, the line and the rule.
    """
    chats = ChatTemplate(tokenizer, template or TemplateOptions()) if chat_template else None
    named = dict(columns or {})
    encoder = _Encoder(
        tokenizer, prompt_key, chats, max_length, vocab_size, columns=named, first_messages=first_messages, check=check
    )
    if chats is not None:
        chats.check_options()
    files = path if isinstance(path, Files) else open_files(path, key)
    agrees(files.digest)
    rows = UsableRows(files, encoder.encoded, Rules(bad_rows, overlong), checked_bytes=checked_bytes)
    if not len(rows):
        where = path if isinstance(path, str | Path) else key
        raise DataError(f"{where}: no prompt is left: {_why_none(rows.dropped, max_length)}")
    if encoder.first is None and draws:  # nobody has looked at a row yet
        rows.draw(PromptOrder(len(rows), 0, False), 1)
    assert encoder.first is not None or not draws, "a row that can be used has columns"
    columns_there = () if encoder.first is None else tuple(encoder.first.columns)
    return PromptDataset(rows, columns_there, None if start_ahead is None else encoder.started(start_ahead))


def _why_none(dropped: Dropped, max_length: int) -> str:
    if dropped.num_bad:
        return next(error for reason, error in dropped.first.items() if reason != "too long")
    return (
        f"all {dropped.num_overlong} are longer than data.max_prompt_length = {max_length} tokens; the shortest has "
        f"{dropped.shortest}"
    )


@dataclass
class _Encoder:
    tokenizer: PreTrainedTokenizerBase
    prompt_key: str
    template: ChatTemplate | None
    max_length: int
    vocab_size: int
    columns: Mapping[str, str]
    first_messages: FirstMessages | None
    check: Callable[[Mapping[str, Any]], None]
    first: PromptText | None = field(default=None)  # whose columns all others have to have

    def encoded(self, rows: Sequence[Row]) -> list[Prompt | RowError]:
        found = [attempt(self._text, row) for row in rows] if self.first_messages is None else self._begun(rows)
        tokens = iter(
            self._tokens([row.text for row in found if isinstance(row, PromptText) and row.token_ids is None])
        )
        return [
            row if isinstance(row, RowError) else self._prompt(row, next(tokens) if row.token_ids is None else None)
            for row in found
        ]

    def started(self, start_ahead: Callable[[Sequence[Row]], None]) -> Callable[[Sequence[Row]], None]:
        """With rows as `first_messages` has them."""

        def start(rows: Sequence[Row]) -> None:
            start_ahead([row for row in self._named(rows) if isinstance(row, Row)])

        return start

    def _named(self, rows: Sequence[Row]) -> list[Row | RowError]:
        return [attempt(lambda row: rename_fields(row, self.columns), row) for row in rows]

    def _begun(self, rows: Sequence[Row]) -> list[PromptText | RowError]:
        """The conversations that an environment begins, with all of the rows as columns."""
        assert self.first_messages is not None and self.template is not None, "an environment needs a template"
        given = self._named(rows)
        there = [row for row in given if isinstance(row, Row)]
        begun = iter(self.first_messages(there))
        return [row if isinstance(row, RowError) else attempt(self._begun_text, (row, next(begun))) for row in given]

    def _begun_text(self, started: tuple[Row, Begun | RowError]) -> PromptText:
        row, begun = started
        if isinstance(begun, RowError):
            raise begun
        assert self.template is not None, "an environment needs a template"
        if begun.messages is None:
            text = PromptText(row.where, "", [], dict(row.fields))
        else:
            rendered = self._rendered(row, begun, begun.messages)
            text = PromptText(row.where, rendered, None, dict(row.fields), begun.messages)
        self._check_columns(text)
        return text

    def _rendered(self, row: Row, begun: Begun, messages: list[Message]) -> str:
        assert self.template is not None, "an environment needs a template"
        where = f"{row.where}: data.environment"
        try:
            text = self.template.prompt(messages, begun.fields, where)
            check_encodable(text, where)
        except RowError as error:
            raise begun.failed(str(error)) from error
        return text

    def _text(self, row: Row) -> PromptText:
        text = prompt_text(rename_fields(row, self.columns), self.prompt_key, self.template)
        self._check_columns(text)
        if text.token_ids is not None:
            check_token_ids(text.token_ids, f"{row.where}: {self.prompt_key}", self.vocab_size)
        return text

    def _check_columns(self, text: PromptText) -> None:
        self.first = self.first or text
        check_same_columns(self.first, text)
        try:
            self.check(text.columns)
        except ValueError as error:
            raise RowError(f"{text.where}: {error}", "nothing to score by") from error

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Of each text. A rendered conversation has special tokens already; a plain prompt gets them, but no end
        token, after which there would be nothing to say."""
        if not texts:
            return []
        encode, special = self.tokenizer, self.template is None
        encoded: list[list[int]] = encode(texts, add_special_tokens=special, verbose=False)["input_ids"]
        if self.template is not None:
            return encoded
        return [ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids for ids in encoded]

    def _prompt(self, text: PromptText, made: list[int] | None) -> Prompt | RowError:
        ids = text.token_ids if made is None else made
        assert ids is not None, f"{text.where}: a prompt without token ids has a text"
        problem = self._problem(text, ids)
        shown_text = text.text if made is not None or problem is not None else decoded(ids, self.tokenizer)
        return Prompt(shown_text, ids, text.columns, text.messages) if problem is None else problem

    def _problem(self, text: PromptText, ids: list[int]) -> RowError | None:
        if text.token_ids == []:
            return None  # nobody knows it yet
        if not ids:
            return RowError(f"{text.where}: the tokenizer makes no tokens of the prompt {shown(text.text)}", "empty")
        if len(ids) > self.max_length:
            return OverlongError(
                f"{text.where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length = "
                f"{self.max_length}; data.overlong_prompts=drop leaves such prompts out, or set data.max_prompt_length="
                f"{len(ids)}",
                len(ids),
            )
        largest = max(ids)
        if largest >= self.vocab_size:  # the tokenizer has more tokens than the model's config says
            return RowError(
                f"{text.where}: the prompt has the token id {largest} "
                f"({shown(self.tokenizer.convert_ids_to_tokens(largest))}), but the ids of the actor's model are below "
                f"vocab_size = {self.vocab_size}",
                "unknown token",
            )
        return None


def check_same_columns(first: PromptText, text: PromptText) -> None:
    for having, lacking in ((first, text), (text, first)):
        missing = [key for key in having.columns if key not in lacking.columns]
        if missing:
            raise RowError(
                f"{lacking.where}: has no key {missing[0]!r}, which {having.where} has; every line needs the same "
                f"columns",
                "other columns",
            )
